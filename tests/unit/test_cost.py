"""Costs are arithmetic of a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.cost import Cost, cost, state_bytes
from pytest_distcompat.scenario import STEPS
from pytest_distcompat.trace import (
    ModelInfo,
    OptimizerInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    StateInfo,
    Trace,
    UnwrappedInfo,
)

CELL = Cell.parse("fsdp2-fp32-w2")
MEMORY = CHECKS.get("memory")
TRAINED = ParameterInfo("a", (4, 8), "bfloat16")
FROZEN = ParameterInfo("frozen", (8,), "bfloat16", trainable=False)
UNWRAPPED = UnwrappedInfo((TRAINED, FROZEN))


def run(name: str = "train", *, seconds: float = 0.5, ranks: int = 2, **states: int) -> RunTrace:
    """A sharded training: ``states`` are elements of each kind of optimizer state on each rank, in float32."""
    infos = []
    for key, numel in states.items():
        infos.append(StateInfo("a", key, "float32", numel, "d"))
    optimizer = OptimizerInfo(("AdamW",), 1, states=tuple(infos))
    shard = ParameterInfo("a", (4, 8), "float32", local_numel=16, held=1)
    model = ModelInfo("Toy", {}, (shard,))
    snapshots = [Snapshot(rank, name, "build_model", 0, unwrapped=UNWRAPPED) for rank in range(ranks)]
    for index in range(1, STEPS + 1):
        # The first steps are slow, and rank 1 is always a little slower than rank 0.
        took = seconds
        if index < 5:
            took *= 20
        for rank in range(ranks):
            snapshot = Snapshot(rank, name, "step", index, took + rank, tokens=100, memory=7 + rank)
            snapshots.append(replace(snapshot, model=model, optimizer=optimizer))
    return RunTrace(name, ranks, tuple(snapshots), cell="ddp-fp32-w2")


def trace(*runs: RunTrace, limit: float = 0.0) -> Trace:
    return Trace("toy", {run.name: run for run in runs}, limits={"throughput": limit})


def test_throughput_is_of_one_rank_at_the_pace_of_the_slowest_after_the_first_steps() -> None:
    costs = cost(trace(run(exp_avg=16, exp_avg_sq=16)))
    # Masters (the live parameters) and two moments, 32 of each over both ranks, 4 bytes, for 32 trained elements.
    assert costs == Cost(step_seconds=1.5, tokens_per_second=100 / 1.5, memory=8, state_bytes=12.0)


@pytest.mark.parametrize("seconds", [0.01, 90.0])
def test_a_single_step_that_is_fast_or_slow_decides_nothing(seconds: float) -> None:
    sound = run()
    last = max(snapshot.index for snapshot in sound.snapshots)
    snapshots = []
    for snapshot in sound.snapshots:
        if snapshot.index == last:
            snapshots.append(replace(snapshot, seconds=seconds))
        else:
            snapshots.append(snapshot)
    assert cost(trace(replace(sound, snapshots=tuple(snapshots)))) == cost(trace(sound))


def test_mfu_needs_a_device_whose_peak_is_known() -> None:
    costs = cost(trace(run()), device="NVIDIA H200")
    assert costs is not None
    tokens_per_second = 100 / 1.5
    floating_point_operations = 6 * 40 * tokens_per_second
    assert costs.mfu == pytest.approx(floating_point_operations / 989e12)
    assert cost(trace(run()), device="NVIDIA Unheard-of")


def test_flat_masters_count_and_the_live_parameters_then_do_not() -> None:
    assert state_bytes(run(master=16, exp_avg=16)) == 8.0


def test_a_run_that_was_too_short_has_no_cost() -> None:
    first_snapshots = [snapshot for snapshot in run().snapshots if snapshot.index < 3]
    short = RunTrace("train", 2, tuple(first_snapshots))
    assert cost(trace(short)) is None
    assert cost(trace()) is None


def memory_findings(cell: Cell, run: RunTrace) -> list[str]:
    return MEMORY.findings(cell, trace(run))


def test_memory_is_silent_where_each_is_kept_once() -> None:
    sound = run(exp_avg=16, exp_avg_sq=16, step=1)
    assert memory_findings(CELL, sound) == []


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"exp_avg": 16, "exp_avg_sq": 216}, "keep 432 elements of 'exp_avg_sq'; 32 elements are trained, expected 32"),
        ({"exp_avg": 8, "exp_avg_sq": 16}, "keep 16 elements of 'exp_avg'; 32 elements are trained, expected 32"),
        ({"master": 150}, "keep 300 elements of 'master'; 32 elements are trained, expected 32"),
    ],
)
def test_memory_speaks_of_too_much_and_too_little(states: dict[str, int], message: str) -> None:
    wrong = run("train", seconds=0.5, ranks=2, **states)
    (finding,) = memory_findings(CELL, wrong)
    assert message in finding


def test_replicas_keep_one_each() -> None:
    cell = Cell.parse("ddp-fp32-w2")
    wrong = run(master=32, exp_avg=16)
    (finding,) = memory_findings(cell, wrong)
    assert "keep 32 elements of 'exp_avg'; 32 elements are trained, on each of 2 ranks, expected 64" in finding


def test_a_rank_that_did_not_report_is_named() -> None:
    both = run(exp_avg=32, master=32)
    of_rank_0 = [snapshot for snapshot in both.snapshots if snapshot.rank == 0]
    alone = RunTrace("train", 2, tuple(of_rank_0))
    findings = memory_findings(CELL, alone)
    assert "rank 1: no report after three steps" in findings


def test_throughput_is_compared_only_as_the_limit_says() -> None:
    train = run(seconds=2)
    baseline = run("baseline", seconds=0.5)
    check = CHECKS.get("throughput")
    (finding,) = check.findings(CELL, trace(train, baseline, limit=0.9))
    assert finding == "33.33 tokens a second and rank, 0.50 of ddp's 66.67; expected at least 0.9 of it"
    assert check.findings(CELL, trace(train, baseline, limit=0.4)) == []
    assert check.limit == "throughput"
