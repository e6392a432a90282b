"""Check ``accumulation`` on hand-made traces: missing micro-batches, too many reductions and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.trace import CollectiveInfo, StepInfo

if TYPE_CHECKING:
    from tests.checks.traces import Sound

    from pytest_distcompat.trace import Snapshot

ONCE = tuple(f"{strategy}-fp32-w2-grad_accum_2" for strategy in ("ddp", "fsdp1", "fsdp2", "zero0", "zero1"))
EACH = tuple(f"{strategy}-fp32-w2-grad_accum_2" for strategy in ("zero2", "zero3"))


def reduced(elements: int, calls: int = 1, dtype: str = "float32") -> dict[str, tuple[CollectiveInfo, ...]]:
    return {"collectives": (CollectiveInfo("allreduce", dtype, calls, elements // calls or 1, elements),)}


@pytest.mark.parametrize("cell", ONCE)
def test_reduced_after_each_micro_batch(sound: Sound, cell: str) -> None:
    story = sound(cell).snapshot("step", reduced(32, 2), nth=1, rank=1)
    assert story.findings("accumulation") == [
        "step 2: rank 1: 32 elements of gradients were reduced; expected 16 with one micro-batch"
    ]


@pytest.mark.parametrize("cell", EACH)
def test_reduced_once_though_gradients_are_partitioned(sound: Sound, cell: str) -> None:
    story = sound(cell).snapshot("step", reduced(16), nth=0, rank=0)
    assert story.findings("accumulation") == [
        "step 1: rank 0: 16 elements of gradients were reduced; expected 2 times 16, once a micro-batch"
    ]


@pytest.mark.parametrize("cell", [*ONCE, *EACH])
def test_an_incomplete_step_at_the_end_of_an_epoch_is_not_reduced(sound: Sound, cell: str) -> None:
    story = sound(cell).snapshot("step", {"collectives": ()}, nth=7, rank=0)
    assert story.findings("accumulation") == [
        "step 8: rank 0: 0 elements of gradients were reduced; expected 16 with one micro-batch"
    ]


def test_norms_flags_and_padding_are_no_gradients(sound: Sound) -> None:
    def more(snapshot: Snapshot) -> Snapshot:
        norm = CollectiveInfo("allreduce", "float32", 9, 1, 9)
        flag = CollectiveInfo("allreduce", "int64", 1, 16, 16)
        few = CollectiveInfo("allreduce", "float32", 1, 3, 3)
        return replace(snapshot, collectives=(*snapshot.collectives, norm, flag, few))

    story = sound("ddp-fp32-w2-grad_accum_4").alter(more, action="step")
    assert story.findings("accumulation") == []


@pytest.mark.parametrize(
    ("inputs", "nth", "finding"),
    [
        (("a",), 0, "step 1: rank 0: fed 1 micro-batches; expected 2"),
        (("a", "b", "c"), 1, "step 2: rank 0: fed 3 micro-batches; expected 2"),
        (("a", "b", "c"), 9, "step 10: rank 0: fed 3 micro-batches; expected 2 at most"),
        ((), 9, "step 10: rank 0: fed 0 micro-batches; expected 2 at most"),
        (("a", "a"), 9, "step 10: rank 0: 1 of 2 micro-batches are one that was fed before in the same step"),
    ],
)
@pytest.mark.parametrize("cell", ONCE)
def test_the_micro_batches_that_are_fed(
    sound: Sound, cell: str, inputs: tuple[str, ...], nth: int, finding: str
) -> None:
    story = sound(cell).snapshot("step", {"inputs": inputs}, nth=nth, rank=0)
    assert story.findings("accumulation") == [finding]


def test_a_driver_that_does_not_obey_the_option(sound: Sound) -> None:
    """Its own number of micro-batches is fed in both runs, so the finding names the other one."""
    story = sound("ddp-fp32-w2-grad_accum_2").snapshot("step", {"inputs": ("a", "b")}, run="single")
    story = story.snapshot("step", {"inputs": ("a", "b")}, nth=0, rank=0)
    expected = "step 1: rank 0: fed 2 micro-batches; expected 4, as without grad_accum it is fed 2"
    assert story.findings("accumulation")[0] == expected


def test_an_epoch_may_end_anywhere_but_at_its_beginning(sound: Sound) -> None:
    story = sound("ddp-fp32-w2-grad_accum_4").snapshot("step", {"inputs": ("a",)}, nth=3)
    assert story.findings("accumulation") == []


@pytest.mark.parametrize("cell", [*ONCE, *EACH])
@pytest.mark.parametrize("times", [0, 2])
def test_the_optimizer_steps_once(sound: Sound, cell: str, times: int) -> None:
    step = StepInfo("AdamW", ("float32",), ("float32",), ("float32",))
    story = sound(cell).snapshot("step", {"steps": (step,) * times}, nth=12, rank=1)
    assert story.findings("accumulation") == [
        f"step 13: rank 1: the optimizer stepped {times} times; 1 with one micro-batch"
    ]


def test_two_optimizers_step_once_each(sound: Sound) -> None:
    step = StepInfo("AdamW", ("float32",), ("float32",), ("float32",))
    story = sound("ddp-fp32-w2-grad_accum_2")
    for run in ("train", "single"):
        story = story.snapshot("step", {"steps": (step, step)}, run=run)
    assert story.findings("accumulation") == []


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_inputs_of_a_compiled_graph_are_unknown(sound: Sound, strategy: str) -> None:
    story = sound(f"{strategy}-fp32-w2-grad_accum_2-compile")
    for run in ("train", "single"):
        story = story.snapshot("step", {"inputs": ()}, run=run)
    assert story.findings("accumulation") == []
    expected = "16 with one micro-batch" if strategy == "ddp" else "2 times 16, once a micro-batch"
    changed = story.snapshot("step", reduced(48), nth=2, rank=0)
    assert changed.findings("accumulation") == [
        f"step 3: rank 0: 48 elements of gradients were reduced; expected {expected}"
    ]


def test_one_rank_alone_reduces_nothing(sound: Sound) -> None:
    story = sound("ddp-fp32-w1-grad_accum_2")
    for run in ("train", "single"):
        story = story.snapshot("step", {"collectives": ()}, run=run)
    assert story.findings("accumulation") == []


@pytest.mark.parametrize(
    ("run", "nth", "message"), [("train", 6, "step 7"), ("single", 2, "three steps of one micro-batch")]
)
def test_silence_is_no_proof(sound: Sound, run: str, nth: int, message: str) -> None:
    story = sound("fsdp2-fp32-w2-grad_accum_2").without("step", run=run, nth=nth, rank=1)
    assert story.findings("accumulation") == [f"rank 1: no report after {message}"]


def test_cells_to_which_it_does_not_apply() -> None:
    not_applicable = CHECKS.get("accumulation").not_applicable
    assert not_applicable(Cell.parse("ddp-fp32-w2"), Driver) == "there is one micro-batch a step"
    assert not_applicable(Cell.parse("ddp-fp32-w2-grad_accum_4"), Driver) is None


def test_the_other_run_is_that_of_the_cell_without_the_option() -> None:
    cell = Cell.parse("fsdp2-bf16_upcast-w4-model_mlp-grad_accum_4-frozen")
    train, single = CHECKS.get("accumulation").runs(cell, Driver).runs
    assert single.cell(cell).id == "fsdp2-bf16_upcast-w4-model_mlp-frozen"
    assert single.actions == train.actions
    assert single.same_as == "train"
