"""A trace is plain data: through JSON and back, nothing changes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from pytest_distcompat.decode import decode, encode
from pytest_distcompat.trace import (
    CallInfo,
    CollectiveInfo,
    FileInfo,
    Layout,
    Loader,
    MeshDim,
    ModelInfo,
    OptimizerInfo,
    ParameterInfo,
    RowsInfo,
    RunTrace,
    Snapshot,
    StateInfo,
    StepInfo,
    Trace,
    UnwrappedInfo,
)

CUT = Layout((MeshDim("dp_shard", 2, 1, "Shard(0)"),))
INFO = ParameterInfo("a.weight", (3, 2), "bfloat16", False, "DTensor", CUT, local_numel=3, digest="d", held=1)
FULL = Snapshot(
    1,
    "train",
    "step",
    4,
    seconds=0.5,
    loss=2.25,
    unwrapped=UnwrappedInfo((INFO,), (INFO,), ("a.weight", "b.weight"), (("a.weight", "b.weight"),)),
    model=ModelInfo("Toy", {"FSDP2": 3}, (INFO,), (), 2, None, "gloo", 3, ("x.a",), graphs=2),
    optimizer=OptimizerInfo(
        ("Outer", "AdamW"), 2, 1, (StateInfo("a.weight", "step", "float", 1, "d"),), {"a.weight": 3}
    ),
    scheduler="last_epoch=1",
    steps=(StepInfo("AdamW", ("float32",), (), ("float32", "bfloat16")),),
    compute=("bfloat16",),
    collectives=(CollectiveInfo("allreduce", "float32", 2, 6),),
    files=(FileInfo("model.safetensors", "safetensors", "model", ("a.weight",)),),
    call=CallInfo(observes=True, gradients={"a.weight": "d"}, evaluating=("a",), sums={"a.weight": (6, 1.5, 2.25)}),
    rows=(RowsInfo("map", 1, 2, Loader(shuffled=False), (((0, 1), (2,)),)),),
)


@pytest.mark.parametrize(
    "snapshot", [FULL, Snapshot(0, "train", "build_model", 0), replace(FULL, model=None, loss=None)]
)
def test_a_snapshot_comes_back_from_json(snapshot: Snapshot) -> None:
    assert decode(Snapshot, json.loads(json.dumps(encode(snapshot)))) == snapshot


def test_a_snapshot_is_written_with_every_field() -> None:
    assert encode(FULL) == asdict(FULL)


def test_a_loss_that_is_no_number_comes_back_too() -> None:
    back = decode(Snapshot, json.loads(json.dumps(encode(replace(FULL, loss=math.nan)))))
    assert back.loss is not None
    assert math.isnan(back.loss)


def test_unknown_keys_of_a_newer_probe_are_ignored() -> None:
    data = encode(FULL)
    data["model"]["colour"] = data["colour"] = "blue"
    assert decode(Snapshot, data) == FULL


def run(*places: tuple[int, str, int]) -> RunTrace:
    return RunTrace("train", 2, tuple(Snapshot(rank, "train", action, index) for rank, action, index in places))


#: Two ranks, of which the second wrote first and did not get to the last step.
TWO_RANKS = run((1, "build", 0), (0, "build", 0), (1, "step", 1), (0, "step", 1), (0, "save", 2), (0, "step", 3))


@pytest.mark.parametrize(
    ("action", "nth", "ranks"),
    [
        ("build", 0, [0, 1]),
        ("step", 0, [0, 1]),
        ("step", 1, [0]),
        ("step", -1, [0]),
        ("step", -2, [0, 1]),
        ("step", 2, []),
        ("step", -3, []),
        ("load", 0, []),
    ],
)
def test_snapshots_are_found_by_action_and_ordered_by_rank(action: str, nth: int, ranks: list[int]) -> None:
    snapshots = TWO_RANKS.at(action, nth)
    assert [snapshot.rank for snapshot in snapshots] == ranks
    assert {snapshot.action for snapshot in snapshots} <= {action}
    assert len({snapshot.index for snapshot in snapshots}) <= 1


def test_the_first_is_the_lowest_ranks() -> None:
    first = TWO_RANKS.first("build")
    assert first is not None
    assert first.rank == 0
    assert TWO_RANKS.first("load") is None


def test_a_place_in_a_run() -> None:
    assert [snapshot.rank for snapshot in TWO_RANKS.at_index(1)] == [0, 1]
    assert TWO_RANKS.at_index(9) == ()


def test_the_runs_of_a_trace() -> None:
    train = TWO_RANKS
    resume = replace(TWO_RANKS, name="resume")
    trace = Trace.of("torch", [train, resume])
    assert list(trace) == [train, resume]
    assert trace.run() == train
    assert trace.run("resume") == resume
    with pytest.raises(KeyError):
        trace.run("export")
