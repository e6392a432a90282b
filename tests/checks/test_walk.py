"""The claim of a walk, on hand-made traces of two ranks under DDP and of the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Check, find_check
from pytest_distcompat.expect import fails
from pytest_distcompat.ext.walk.check import WALK
from pytest_distcompat.judge import judge
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.trace import (
    CallInfo,
    Layout,
    ModelInfo,
    OptimizerInfo,
    ParameterInfo,
    RunFailure,
    RunTrace,
    Snapshot,
    Sums,
    Trace,
    UnwrappedInfo,
)

CELL = Cell.parse("ddp-fp32-w2-model_mlp")
CALLS = ("step()", "evaluate()", "resume()", "step()")
PARAMETER = ParameterInfo("weight", (4,), "float32", local_numel=4, digest="4:1", held=1)
SUMS = (4, 2.0, 3.0)

Change = Callable[[Snapshot], Snapshot]


def snapshot(rank: int, index: int, action: str, *, observes: bool = False) -> Snapshot:
    name = "weight" if action.startswith("reference") else "module.weight"
    loss = 0.5 if "step" in action else None
    unwrapped = None
    if action == "build_model":
        unwrapped = UnwrappedInfo((PARAMETER,), state_dict=("weight",))
    parameter = dataclasses.replace(PARAMETER, name=name)
    return Snapshot(
        rank,
        "",
        action,
        index,
        loss=loss,
        grad_norm=1.0,
        outputs=(1.0, 2.0),
        rng="rng",
        unwrapped=unwrapped,
        model=ModelInfo("DDP", {}, (parameter,)),
        optimizer=OptimizerInfo(("AdamW",), 1, param_groups=({"lr": 0.1},)),
        call=CallInfo(observes, {name: "4:2"}, (), {name: SUMS}),
    )


def run(name: str, ranks: int, *actions: str) -> RunTrace:
    snapshots = []
    for rank in range(ranks):
        for index, action in enumerate(actions):
            snapshots.append(snapshot(rank, index, action, observes="evaluate" in action))
    return RunTrace(name, ranks, tuple(snapshots), cell=CELL.id)


def walked(change: Change = lambda snapshot: snapshot, *, of: str = "walk-1-0") -> Trace:
    reference_calls = [f"reference {call}" for call in CALLS]
    trace = Trace.of(
        "torch",
        [
            run("walk-1-0", 2, "build_model", "build", "call step()", "call evaluate()", "save"),
            run("walk-1-1", 2, "build_model", "build", "load", "call step()"),
            run("walk-1-reference", 1, "build_model", *reference_calls),
        ],
    )
    snapshots = tuple(map(change, trace.run(of).snapshots))
    return with_run(trace, of, snapshots=snapshots)


def with_run(trace: Trace, name: str, **fields: Any) -> Trace:
    """Return the trace with other fields of the run of that name."""
    changed = dataclasses.replace(trace.run(name), **fields)
    return dataclasses.replace(trace, runs={**trace.runs, name: changed})


def findings_of(trace: Trace) -> list[str]:
    return WALK.findings(CELL, trace)


def at(action: str, **fields: Any) -> Change:
    def change(snapshot: Snapshot) -> Snapshot:
        if snapshot.action == action and snapshot.rank == 1:
            return dataclasses.replace(snapshot, **fields)
        return snapshot

    return change


def test_a_walk_that_does_what_the_reference_does_passes() -> None:
    assert findings_of(walked()) == []


@pytest.mark.parametrize(
    ("action", "fields", "finding"),
    [
        ("call step()", {"loss": 0.7}, "step(): step(): the loss is 0.6; 0.5 in the reference"),
        ("call step()", {"grad_norm": 2.0}, "step(): step(): rank 1: the gradient norm is 2; 1 in the reference"),
        (
            "call evaluate()",
            {"rng": "other"},
            "step(), evaluate(): evaluate(): rank 1: the rng changed: 'other'; expected 'rng'",
        ),
        (
            "call evaluate()",
            {"outputs": (1.0, 2.5)},
            "step(), evaluate(): evaluate(): rank 1: outputs are up to 0.5 off the reference's, which are up to 2",
        ),
    ],
)
def test_what_is_off_is_named_after_the_calls_that_lead_there(
    action: str, fields: dict[str, Any], finding: str
) -> None:
    assert findings_of(walked(at(action, **fields))) == [finding]


def test_parameters_that_are_not_the_references_are_named() -> None:
    off = CallInfo(False, {"module.weight": "4:2"}, (), {"module.weight": (4, 2.5, 3.0)})
    (finding,) = findings_of(walked(at("call step()", call=off)))
    assert finding.startswith("step(): step(): parameters are not the reference's: 'weight': (4, 2.5, 3.0)")


def test_shards_are_added_up_before_they_are_compared() -> None:
    def half(snapshot: Snapshot) -> Snapshot:
        if snapshot.call is None or snapshot.action == "build_model":
            return snapshot
        part = HALVES[1] if snapshot.rank else HALVES[0]
        call = dataclasses.replace(snapshot.call, sums={"module.weight": part})
        return dataclasses.replace(snapshot, call=call)

    assert findings_of(walked(half)) == []


HSDP = Cell.parse("fsdp2-fp32-w4-model_mlp-dp_replicate_2")
#: The sums of a copy's two shards.
HALVES = ((2, 1.5, 2.0), (2, 0.5, 1.0))


def in_two_replicas(halves_by_rank: Mapping[int, Sums], returned: Mapping[int, Sums] | None = None) -> list[str]:
    """Findings where ranks 0, 1 hold one copy of the weight and ranks 2, 3 another, of these shards.

    Args:
        halves_by_rank: The sums of the live shards that are not as they should be.
        returned: Those of the shards that a read-only call returns; by default it returns nothing.
    """
    runs = []
    for name, ranks, *actions in (
        ("walk-1-0", 4, "build_model", "build", "call get_state_dict()"),
        ("walk-1-reference", 1, "build_model", "reference get_state_dict()"),
    ):
        snapshots = []
        for made in run(name, ranks, *actions).snapshots:
            if ranks == 1 or made.action == "build_model":
                snapshots.append(made)
                continue
            rank = made.rank
            holders = (0, 1) if rank < 2 else (2, 3)
            layout = Layout(holders=holders)
            info = dataclasses.replace(PARAMETER, kind="DTensor", local_numel=2, layout=layout)
            sums = {"weight": halves_by_rank.get(rank, HALVES[rank % 2])}
            answer = None
            if returned is not None and made.action != "build":
                answer = {"weight": returned.get(rank, HALVES[rank % 2])}
            model = ModelInfo("FSDPBlock", {}, (info,))
            call = CallInfo(True, {}, (), sums, answer)
            snapshots.append(dataclasses.replace(made, model=model, call=call))
        runs.append(RunTrace(name, ranks, tuple(snapshots), cell=HSDP.id))
    return WALK.findings(HSDP, Trace.of("torch", runs))


def test_shards_of_a_replica_are_added_up_without_those_of_another() -> None:
    assert in_two_replicas({}) == []
    assert in_two_replicas({}, {}) == []
    off = (2, 1.0, 1.0)
    (finding,) = in_two_replicas({3: off})
    assert finding.startswith(
        "get_state_dict(): get_state_dict(): parameters are not the reference's: 'weight': (4, 2.5, 3.0)"
    )
    (finding,) = in_two_replicas({}, {3: off})
    assert finding.startswith(
        "get_state_dict(): get_state_dict(): what it returned is not the reference's: 'weight': (4, 2.5, 3.0)"
    )


WHOLE = CallInfo(True, {"module.weight": "4:2"}, (), {"module.weight": SUMS}, {"weight": SUMS})


def returning(**of_ranks: dict[str, Sums]) -> Change:
    def change(snapshot: Snapshot) -> Snapshot:
        if snapshot.index != 3:
            return snapshot
        returned = of_ranks.get(f"rank{snapshot.rank}", {})
        call = dataclasses.replace(WHOLE, returned=returned)
        return dataclasses.replace(snapshot, call=call)

    return change


def test_what_a_call_returns_on_one_rank_or_in_parts_is_compared() -> None:
    whole = {"weight": SUMS}
    first, second = HALVES
    on_rank_0 = returning(rank0=whole)
    assert findings_of(walked(on_rank_0)) == []
    in_parts = returning(rank0={"weight": second}, rank1={"weight": first})
    assert findings_of(walked(in_parts)) == []
    on_both = returning(rank0=whole, rank1=whole)
    assert findings_of(walked(on_both)) == []
    off = returning(rank0=whole, rank1={"weight": (4, 2.5, 3.0)})
    (finding,) = findings_of(walked(off))
    assert finding.startswith("step(), evaluate(): evaluate(): what it returned is not the reference's: 'weight'")


def test_what_a_call_does_not_return_is_named() -> None:
    (finding,) = findings_of(walked(returning(rank0={"other": SUMS})))
    assert finding == "step(), evaluate(): evaluate(): what it returned lacks 'weight'"


def test_an_observer_may_change_no_gradient_and_no_mode() -> None:
    other = CallInfo(True, {"module.weight": "4:9"}, ("module",), {"module.weight": SUMS})
    findings = findings_of(walked(at("call evaluate()", call=other)))
    text = "\n".join(findings)
    assert "gradients changed: 'module.weight': '4:9'; expected '4:2'" in text
    assert "1 modules are in evaluation mode; 0 were" in text


def test_a_call_that_changes_a_dtype_is_named_though_it_trains() -> None:
    parameter = dataclasses.replace(PARAMETER, name="module.weight", dtype="bfloat16")
    cast = ModelInfo("DDP", {}, (parameter,))
    (finding,) = findings_of(walked(at("call step()", model=cast)))
    assert "parameters are not as built: 'module.weight'" in finding


def test_what_a_resumed_group_loaded_is_compared_too() -> None:
    slower = OptimizerInfo(("AdamW",), 1, param_groups=({"lr": 0.2},))
    (finding,) = findings_of(walked(at("load", optimizer=slower), of="walk-1-1"))
    assert finding == "step(), evaluate(), resume(): resume(): rank 1: the learning rates are 0.2; 0.1 in the reference"


def test_an_exception_is_a_finding_of_the_call_that_raised() -> None:
    trace = walked()
    end = RunFailure("raised", "rank 1 raised ValueError: no", "", "call evaluate()", 3, 1)
    kept = tuple(snapshot for snapshot in trace.run("walk-1-0").snapshots if snapshot.index < 3)
    broken = with_run(trace, "walk-1-0", snapshots=kept, end=end)
    assert findings_of(broken) == ["step(), evaluate(): evaluate(): raised: ValueError: no"]


def test_a_reference_that_raised_is_no_pass() -> None:
    trace = walked()
    built, *_ = trace.run("walk-1-reference").snapshots
    end = RunFailure("raised", "rank 0 raised NameError: x", "", "reference step()", 1, 0)
    broken = with_run(trace, "walk-1-reference", snapshots=(built,), end=end)
    (finding,) = findings_of(broken)
    assert "the reference: rank 0 raised NameError: x" in finding


def test_a_cell_of_another_model_or_driver_has_no_walk() -> None:
    from pytest_distcompat.driver import Driver
    from pytest_distcompat.drivers.torch import TorchDriver

    assert "declares no calls" in str(WALK.not_applicable(CELL, Driver))
    assert "model mlp" in str(WALK.not_applicable(Cell.parse("ddp-fp32-w2"), TorchDriver))
    assert WALK.not_applicable(CELL, TorchDriver) is None


@pytest.mark.parametrize(("match", "status"), [("", "failed"), ("no state", "known")])
def test_what_is_declared_for_walks_excuses_another_check_by_the_error_alone(match: str, status: str) -> None:
    """A walk says of no run what it needs, so that none can have ended it by the same error."""
    assert find_check("walk").name == WALK.name
    end = RunFailure("raised", "rank 1 raised TypeError: no state", "TypeError: no state", "step", 1)
    trace = Trace.of("hand-made", [RunTrace("train", 2, (), end, cell=CELL.id)])
    resume = Check("resume", TRAIN, (("train", "step", 1),), lambda cell, trace: ())
    assert judge(resume, CELL, trace, [fails("walk", reason="org/repo#4", match=match)]).status == status
