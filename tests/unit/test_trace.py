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
    assert from_json(to_json(snapshot)) == snapshot


def to_json(snapshot: Snapshot) -> str:
    return json.dumps(encode(snapshot))


def from_json(text: str) -> Snapshot:
    return decode(Snapshot, json.loads(text))


def test_a_snapshot_is_written_with_every_field() -> None:
    assert encode(FULL) == asdict(FULL)


def test_a_loss_that_is_no_number_comes_back_too() -> None:
    diverged = replace(FULL, loss=math.nan)
    back = from_json(to_json(diverged))
    assert back.loss is not None
    assert math.isnan(back.loss)


def test_unknown_keys_of_a_newer_probe_are_ignored() -> None:
    data = encode(FULL)
    data["model"]["colour"] = "blue"
    data["colour"] = "blue"
    assert decode(Snapshot, data) == FULL


#: Two ranks, of which the second wrote first and did not get to the last step.
TWO_RANKS = RunTrace(
    "train",
    2,
    (
        Snapshot(1, "train", "build", 0),
        Snapshot(0, "train", "build", 0),
        Snapshot(1, "train", "step", 1),
        Snapshot(0, "train", "step", 1),
        Snapshot(0, "train", "save", 2),
        Snapshot(0, "train", "step", 3),
    ),
)


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
    for snapshot in snapshots:
        assert snapshot.action == action
        assert snapshot.index == snapshots[0].index


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
