"""Check ``start`` on hand-made traces: what a trainer begins with is not what was loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.checks.more_runs import digest_of
from tests.checks.traces import Able

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.digests import EMPTY
from pytest_distcompat.trace import RunTrace, Snapshot, StateInfo

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

CELLS = ("ddp-fp32-w2", "fsdp1-fp32-w2", "fsdp2-bf16_upcast-w4", "zero1-fp32-w2", "zero3-fp32-w4")
RunsOf = Callable[[str, str], "Story"]


def loaded(story: Story, **changes: Any) -> Story:
    """Return the story with other fields of the loaded ``outlet.weight``."""

    def change(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        parameters = []
        for info in snapshot.unwrapped.parameters:
            if info.name == "outlet.weight":
                parameters.append(replace(info, **changes))
            else:
                parameters.append(info)
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, parameters=tuple(parameters)))

    return story.alter(change, action="build_model")


@pytest.mark.parametrize("cell", CELLS)
def test_a_trainer_that_starts_from_what_was_loaded(runs_of: RunsOf, sound: Sound, cell: str) -> None:
    assert runs_of(cell, "start").findings("start") == []
    assert sound(cell).findings("start") == []


@pytest.mark.parametrize("cell", CELLS)
def test_a_parameter_has_other_values(runs_of: RunsOf, cell: str) -> None:
    story = loaded(runs_of(cell, "start"), digest="14:3")
    assert story.findings("start") == ["parameter 'outlet.weight': other values after build than were loaded"]


@pytest.mark.parametrize("cell", CELLS)
def test_of_the_meta_device_no_values_are_known(runs_of: RunsOf, cell: str) -> None:
    story = loaded(runs_of(cell, "start"), digest=EMPTY)
    assert story.findings("start") == []


def test_a_rank_has_other_values_than_the_others(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "start").parameters({"digest": "14:3"}, only="outlet.weight", action="build", rank=1)
    expected = "parameter 'outlet.weight': unlike from rank to rank after build; expected the loaded values"
    assert story.findings("start") == [expected]


@pytest.mark.parametrize(
    ("cell", "dtype", "is_finding"),
    [
        # What computes in float16 is rounded, and what is upcast again is not to be.
        ("ddp-fp16_mixed-w2", "float16", False),
        ("ddp-fp16_mixed-w2", "float32", True),
        # DeepSpeed casts the model, and copies its masters from that.
        ("zero1-fp16_mixed-w2", "float32", False),
        # The check ``dtypes`` has a finding about bfloat16 here.
        ("ddp-fp16_mixed-w2", "bfloat16", False),
    ],
)
def test_rounding_is_allowed_where_the_precision_rounds(
    runs_of: RunsOf, cell: str, dtype: str, is_finding: bool
) -> None:
    story = runs_of(cell, "start")
    rounded = digest_of([1] * 14)
    story = loaded(story, rounded=rounded)
    story = story.parameters({"digest": rounded, "dtype": dtype}, only="outlet.weight", action="build")
    assert bool(story.findings("start")) == is_finding


def test_what_is_stored_in_float16_is_not_just_anything_rounded(runs_of: RunsOf) -> None:
    story = loaded(runs_of("ddp-fp16_mixed-w2", "start"), rounded=digest_of([1] * 14))
    story = story.parameters({"dtype": "float16"}, only="outlet.weight", action="build")
    assert story.findings("start") == ["parameter 'outlet.weight': other values after build than were loaded"]


@pytest.mark.parametrize("cell", ["zero1-fp32-w2", "zero3-fp32-w2"])
def test_a_master_has_other_values(runs_of: RunsOf, cell: str) -> None:
    story = runs_of(cell, "start")
    half = StateInfo(story.live("outlet.weight"), "master", "float32", 14, "14:3")
    story = story.optimizer({"masters": (half,)}, action="build")
    assert story.findings("start") == ["master 'outlet.weight': other values after build than were loaded"]


def test_a_buffer_is_in_another_dtype_and_has_other_values(runs_of: RunsOf) -> None:
    story = runs_of("ddp-bf16_upcast-w2", "start").buffers({"dtype": "bfloat16"}, action="build")
    assert story.findings("start") == []
    other = story.buffers({"digest": "4:3"}, action="build", rank=1)
    assert other.findings("start") == ["rank 1: buffer 'scale': other values after build than were loaded"]


@pytest.mark.parametrize("cell", CELLS)
def test_a_parameter_is_frozen_or_thawed(runs_of: RunsOf, cell: str) -> None:
    story = runs_of(cell, "start")
    frozen = story.parameters({"trainable": False}, only="outlet.weight", action="build", rank=0)
    assert frozen.findings("start") == ["rank 0: parameter 'outlet.weight': frozen after build; trainable when loaded"]
    thawed = story.parameters({"trainable": True}, only="frozen.weight", action="build", rank=1)
    assert thawed.findings("start") == ["rank 1: parameter 'frozen.weight': trainable after build; frozen when loaded"]


@pytest.mark.parametrize(
    ("modules", "finding"),
    [
        (("", "outlet", "frozen"), "the whole model is in evaluation mode in step 1; in training mode when loaded"),
        (("outlet", "frozen"), "module 'outlet' is in evaluation mode in step 1; in training mode when loaded"),
        # Nothing that it does not train: a trainer may do so.
        (("frozen",), ""),
    ],
)
def test_the_first_step_is_taken_in_evaluation_mode(sound: Sound, modules: tuple[str, ...], finding: str) -> None:
    story = sound("fsdp2-fp32-w2").snapshot("step", {"evaluating": modules}, nth=0, rank=1)
    findings = story.findings("start")
    if finding:
        assert findings == [f"rank 1: {finding}"]
    else:
        assert findings == []


def test_a_model_that_was_loaded_in_evaluation_mode(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"evaluating": ("", "outlet")}, nth=0)
    changed = story.unwrapped({"evaluating": ("", "outlet", "frozen")}, action="build_model")
    assert changed.findings("start") == []


def test_no_model_was_seen(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").without("build_model").without("build")
    findings = story.findings("start")
    assert findings == ["rank 0, 1: no report after build", "the unwrapped model was not recorded"]


@pytest.mark.parametrize(("cell", "is_finding"), [("fsdp1-fp32-w2", False), ("ddp-fp32-w2", True)])
def test_flat_pieces_of_a_transposed_parameter(runs_of: RunsOf, cell: str, is_finding: bool) -> None:
    story = loaded(runs_of(cell, "start"), digest="14:3")
    transposed = story.unwrapped({"noncontiguous": ("outlet.weight",)}, action="build_model")
    assert bool(transposed.findings("start")) == is_finding


ADAPTER = "ddp-fp32-w2-lora"


def evaluated(story: Story, adapted: tuple[float, ...], unadapted: tuple[float, ...]) -> Story:
    """Return the story with the outputs of the model with a new adapter, and without one."""
    for name, outputs in (("adapted", adapted), ("unadapted", unadapted)):
        snapshot = Snapshot(0, name, "evaluate", 1, outputs=outputs)
        story = story.with_run(RunTrace(name, 1, (snapshot,), cell="ddp-fp32-w1"))
    return story


def test_a_new_adapter_changes_nothing(runs_of: RunsOf) -> None:
    story = evaluated(runs_of(ADAPTER, "start"), (0.5, -2.0), (0.5, -2.0))
    assert story.findings("start") == []


@pytest.mark.parametrize("value", [0.501, float("nan")])
def test_a_new_adapter_changes_an_output(runs_of: RunsOf, value: float) -> None:
    story = evaluated(runs_of(ADAPTER, "start"), (value, -2.0), (0.5, -2.0))
    (finding,) = story.findings("start")
    assert finding.startswith("a new adapter changes outputs of the model by up to ")
    assert finding.endswith(" (4.0e-05 allowed, of 2)")


def test_nothing_is_computed_without_the_adapter(runs_of: RunsOf) -> None:
    story = evaluated(runs_of(ADAPTER, "start"), (0.5, -2.0), ())
    assert story.findings("start") == ["without the adapter the model computed nothing to compare with"]


@pytest.mark.parametrize(
    ("cell", "compared"),
    [
        ("ddp-fp32-w2", False),
        (ADAPTER, True),
        ("ddp-fp32-w2-lora_int8", False),
        (f"{ADAPTER}-set_LoraConfig.r=7", True),
        (f"{ADAPTER}-set_LoraConfig.init_lora_weights=false", False),
    ],
)
def test_which_adapters_change_nothing(cell: str, compared: bool) -> None:
    runs = CHECKS.get("start").runs(Cell.parse(cell), Able).runs
    assert ("unadapted" in {run.name for run in runs}) == compared


def test_the_model_without_the_adapter_is_of_a_cell_without_it() -> None:
    cell = Cell.parse("fsdp2-bf16_upcast-w2-model_mlp-lora-set_AdamW.lr=0.1+PeftConfig.peft_type=LOHA")
    _, adapted, unadapted = CHECKS.get("start").runs(cell, Able).runs
    assert adapted.cell(cell).id == "ddp-fp32-w1-model_mlp-lora-set_PeftConfig.peft_type=LOHA"
    assert unadapted.cell(cell).id == "ddp-fp32-w1-model_mlp"
