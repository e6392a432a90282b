"""Check ``resume`` on hand-made traces: state that the checkpoint did not restore."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.checks import CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import Snapshot, StateInfo, StepInfo

CELLS = ("ddp-fp32-w2", "fsdp2-bf16_upcast-w2", "zero1-bf16_upcast-w2", "zero3-fp32-w2")


@pytest.mark.parametrize("cell", CELLS)
def test_a_parameter_with_other_values(sound: Sound, cell: str) -> None:
    story = sound(cell)
    other = story.parameters({"digest": "other"}, only="outlet.weight", run="resume", action="load", rank=1)
    assert other.findings("resume") == [
        f"rank 1: parameter {story.live('outlet.weight')!r}: other values after the load"
    ]


def test_a_buffer_with_other_values(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").buffers({"digest": "doubled"}, run="resume", action="load", rank=0)
    assert story.findings("resume") == ["rank 0: buffer 'scale': other values after the load"]


def test_no_model_after_the_load(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").snapshot("load", {"model": None}, run="resume", rank=0)
    assert story.findings("resume") == [
        "rank 0: parameter 'frozen.weight' and 2 others: missing after the load",
        "rank 0: buffer 'scale': missing after the load",
    ]


def test_another_name_after_the_load(sound: Sound) -> None:
    where = {"run": "resume", "action": "load", "rank": 0}
    story = sound("fsdp2-fp32-w2").parameters({"name": "_orig_mod.outlet.weight"}, only="outlet.weight", **where)
    assert story.findings("resume") == [
        "rank 0: parameter 'outlet.weight': missing after the load",
        "rank 0: parameter '_orig_mod.outlet.weight': new after the load",
    ]


@pytest.mark.parametrize(("cell", "tensors"), [("ddp-fp32-w2", 6), ("fsdp2-fp32-w2", 6), ("zero3-fp32-w2", 4)])
@pytest.mark.parametrize("part", ["states", "optimizer"])
def test_the_optimizer_comes_back_empty(sound: Sound, cell: str, tensors: int, part: str) -> None:
    story = sound(cell)
    if part == "states":
        story = story.optimizer({"states": ()}, run="resume", action="load", rank=1)
    else:
        story = story.snapshot("load", {"optimizer": None}, run="resume", rank=1)
    assert story.findings("resume") == [
        f"rank 1: the optimizer's state is empty after the load; {tensors} tensors were saved"
    ]


@pytest.mark.parametrize(
    ("cell", "owner"),
    [("ddp-fp32-w2", "module.inlet.weight"), ("fsdp2-fp32-w2", "inlet.weight"), ("zero1-fp32-w2", "partition 0")],
)
@pytest.mark.parametrize("key", ["exp_avg", "step"])
@pytest.mark.parametrize("fate", ["missing", "other values"])
def test_one_tensor_of_the_state(sound: Sound, cell: str, owner: str, key: str, fate: str) -> None:
    def change(snapshot: Snapshot) -> Snapshot:
        assert snapshot.optimizer is not None
        states: list[StateInfo] = []
        for state in snapshot.optimizer.states:
            is_chosen = state.owner == owner and state.key == key
            if not is_chosen:
                states.append(state)
            elif fate == "other values":
                states.append(replace(state, digest="other"))
        return with_states(snapshot, states)

    story = sound(cell).alter(change, run="resume", action="load", rank=0)
    assert story.findings("resume") == [f"rank 0: optimizer state '{key} of {owner}': {fate} after the load"]


def with_states(snapshot: Snapshot, states: Iterable[StateInfo]) -> Snapshot:
    """Return the snapshot with these states in the optimizer."""
    assert snapshot.optimizer is not None
    return replace(snapshot, optimizer=replace(snapshot.optimizer, states=tuple(states)))


def test_state_that_appears_from_nowhere(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2")
    for action, nth in (("step", 2), ("save", 0)):
        story = story.optimizer({"states": ()}, action=action, nth=nth, rank=0)
    assert story.findings("resume") == [
        "rank 0: optimizer state 'exp_avg of inlet.weight' and 5 others: new after the load"
    ]


@pytest.mark.parametrize(
    ("saved", "loaded", "is_finding"), [("float32", "bfloat16", True), ("float", "float32", False)]
)
def test_state_in_another_dtype(sound: Sound, saved: str, loaded: str, *, is_finding: bool) -> None:
    story = sound("ddp-fp32-w2")
    for action, nth in (("step", 2), ("save", 0)):
        story = story.state("exp_avg", {"dtype": saved}, only="inlet.weight", action=action, nth=nth)
    for rank, dtype in enumerate((saved, loaded)):
        changes = {"dtype": dtype}
        story = story.state("exp_avg", changes, only="inlet.weight", run="resume", action="load", rank=rank)
    findings = story.findings("resume")
    if is_finding:
        assert findings == ["rank 1: optimizer state 'exp_avg of module.inlet.weight': another dtype after the load"]
    else:
        assert findings == []


@pytest.mark.parametrize("cell", CELLS)
def test_a_parameter_in_another_dtype(sound: Sound, cell: str) -> None:
    story = sound(cell)
    other = story.parameters({"dtype": "float16"}, only="outlet.weight", run="resume", action="load", rank=1)
    assert other.findings("resume") == [
        f"rank 1: parameter {story.live('outlet.weight')!r}: another dtype after the load"
    ]


@pytest.mark.parametrize(
    ("group", "finding"),
    [
        ({"lr": 0.5}, "lr of the optimizer's group 0 is 0.5 after the load; 0.1 before"),
        ({"lr": 0.1, "eps": 1.0}, "eps of the optimizer's group 0 is 1.0 after the load; None before"),
        ({}, "lr of the optimizer's group 0 is None after the load; 0.1 before"),
    ],
)
def test_a_number_of_a_group(sound: Sound, group: dict[str, float], finding: str) -> None:
    story = sound("zero1-fp32-w2").optimizer({"param_groups": (group,)}, run="resume", action="load", rank=0)
    assert story.findings("resume") == [f"rank 0: {finding}"]


@pytest.mark.parametrize("param_groups", [(), ({"lr": 0.1}, {"lr": 0.2})])
def test_another_number_of_groups(sound: Sound, param_groups: tuple[dict[str, float], ...]) -> None:
    story = sound("ddp-fp32-w2").optimizer({"param_groups": param_groups}, run="resume", action="load", rank=0)
    message = f"rank 0: the optimizer has {len(param_groups)} param groups after the load; 1 before"
    assert message in story.findings("resume")


@pytest.mark.parametrize("cell", CELLS)
def test_saving_changes_nothing(sound: Sound, cell: str) -> None:
    # What the save made of it is what the load then gives back.
    saved = {"run": "train", "action": "save", "rank": 0}
    loaded = {"run": "resume", "action": "load", "rank": 0}

    story = sound(cell)
    other = story.parameters({"digest": "other"}, only="outlet.weight", **saved)
    other = other.parameters({"digest": "other"}, only="outlet.weight", **loaded)
    name = story.live("outlet.weight")
    assert other.findings("resume") == [f"rank 0: parameter {name!r}: other values after the save"]

    groups = ({"lr": 0.0},)
    other = story.optimizer({"param_groups": groups}, **saved)
    other = other.optimizer({"param_groups": groups}, **loaded)
    assert other.findings("resume") == ["rank 0: lr of the optimizer's group 0 is 0.0 after the save; 0.1 before"]


@pytest.mark.parametrize("cell", CELLS)
def test_the_scheduler(sound: Sound, cell: str) -> None:
    story = sound(cell).snapshot("load", {"scheduler": "last_epoch=0"}, run="resume", rank=1)
    assert story.findings("resume") == ["rank 1: scheduler is at 'last_epoch=0'; saved at 'last_epoch=3'"]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("nth", "expected"), [(0, "0.25"), (1, "0.2")])
def test_a_loss_of_another_run(sound: Sound, cell: str, nth: int, expected: str) -> None:
    story = sound(cell).snapshot("step", {"loss": 0.375}, run="resume", nth=nth, rank=0)
    assert story.findings("resume") == [
        f"rank 0: loss {nth + 1} after the load is 0.375; {expected} in the run that never stopped"
    ]


@pytest.mark.parametrize(
    ("cell", "units", "is_named"),
    [
        ("fsdp2-fp32-w2", ("", "inlet", "head"), True),
        ("fsdp2-fp32-w2", ("", "outlet"), False),
        ("fsdp1-fp32-w2", ("", "inlet", "head"), False),
    ],
)
def test_a_loss_of_another_run_where_tied_weights_have_two_units(
    sound: Sound, cell: str, units: tuple[str, ...], is_named: bool
) -> None:
    def cut(snapshot: Snapshot) -> Snapshot:
        assert snapshot.model is not None
        return replace(snapshot, model=replace(snapshot.model, units=units))

    story = sound(cell).alter(cut, action="build")
    assert story.findings("resume") == []
    changed = story.snapshot("step", {"loss": 0.375}, run="resume", nth=0, rank=0)
    (finding,) = changed.findings("resume")
    words = "'inlet.weight' and 'head.weight' are one tensor in units of their own: shard them"
    assert (words in finding) == is_named
    # Where there is a reference, losses and norms that differ from its own have the same words.
    changed = story.snapshot("step", {"loss": 0.375}, nth=0)
    first, *_ = changed.findings("parity")
    assert (words in first) == is_named


def test_a_loss_that_is_no_number(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"loss": float("nan")}, run="resume", nth=0, rank=0)
    assert story.findings("resume") == ["rank 0: loss 1 after the load is nan; 0.25 in the run that never stopped"]


def test_more_than_two_bfloat16_numbers_may_add_up_otherwise(sound: Sound) -> None:
    def findings(cell: str, loss: float) -> list[str]:
        story = sound(cell).snapshot("step", {"loss": loss}, run="resume", nth=0, rank=0)
        return story.findings("resume")

    assert findings("ddp-bf16_upcast-w4", 0.2505) == []
    assert findings("ddp-bf16_upcast-w4", 0.252) != []
    assert findings("ddp-bf16_upcast-w2", 0.2505) != []
    assert findings("ddp-fp32-w4", 0.2505) != []


def test_a_loss_in_another_order_of_summing(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"loss": 0.250001}, run="resume", nth=0, rank=0)
    assert story.findings("resume") == []


@pytest.mark.parametrize(("run", "nth"), [("train", 3), ("resume", 0)])
def test_no_loss(sound: Sound, run: str, nth: int) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"loss": None}, run=run, nth=nth, rank=1)
    assert story.findings("resume") == ["rank 1: no loss to compare; expected step() to return it"]


@pytest.mark.parametrize(("run", "action"), [("train", "save"), ("resume", "load")])
def test_a_rank_is_silent(sound: Sound, run: str, action: str) -> None:
    story = sound("ddp-fp32-w2").without(action, run=run, rank=1)
    assert story.findings("resume") == [f"rank 1: no report after {action}"]


@pytest.mark.parametrize(
    ("run", "nth", "what"), [("train", 4, "step 2 after the save"), ("resume", 0, "step 1 after the load")]
)
def test_a_rank_without_the_step_is_silent_too(sound: Sound, run: str, nth: int, what: str) -> None:
    story = sound("ddp-fp32-w2").without("step", run=run, nth=nth, rank=0)
    assert story.findings("resume") == [f"rank 0: no report after {what}"]


def test_a_rank_without_the_step_before_the_save(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").without("step", nth=2, rank=0)
    assert story.findings("resume") == ["rank 0: no report after three steps"]


def test_a_check_runs_without_the_suite(sound: Sound) -> None:
    check = CHECKS.get("resume")
    story = sound("ddp-fp32-w2")
    assert check.findings(story.cell, story.trace) == []
    other = story.snapshot("load", {"scheduler": "new"}, run="resume", rank=1)
    expected = ["rank 1: scheduler is at 'new'; saved at 'last_epoch=3'"]
    assert list(check(other.cell, other.trace)) == expected
    assert check.findings(other.cell, other.trace) == expected


def test_the_gradient_scaler_starts_again(sound: Sound) -> None:
    saved = {"scaler": {"scale": 512.0}}
    story = sound("ddp-fp16_mixed-w2").snapshot("save", saved)
    resumed = story.snapshot("load", saved, run="resume")
    assert resumed.findings("resume") == []
    assert story.findings("resume") == [
        "rank 0: the gradient scaler is at {'scale': 1024.0}; saved at {'scale': 512.0}",
        "rank 1: the gradient scaler is at {'scale': 1024.0}; saved at {'scale': 512.0}",
    ]


def test_of_a_checkpoint_of_the_model_alone_the_model_comes_back(sound: Sound) -> None:
    story = sound("ddp-fp32-w2-save_only_model").snapshot("load", {"optimizer": None, "scheduler": ""}, run="resume")
    assert story.findings("resume") == []
    other = story.parameters({"digest": "other"}, only="outlet.weight", run="resume", action="load", rank=1)
    assert other.findings("resume") == ["rank 1: parameter 'module.outlet.weight': other values after the load"]


def test_state_of_no_element_is_no_state(sound: Sound) -> None:
    """A rank may or may not keep state of a parameter of which it holds nothing, at any count of steps."""

    def gone(snapshot: Snapshot) -> Snapshot:
        assert snapshot.optimizer is not None
        others = [state for state in snapshot.optimizer.states if state.owner != "outlet.weight"]
        return with_states(snapshot, others)

    empty = {"numel": 0}
    resumed = sound("fsdp2-fp32-w2").state("", empty, only="outlet.weight", run="resume", rank=1)
    kept = resumed.state("", empty, only="outlet.weight", run="train", rank=1)
    assert kept.findings("resume") == []
    trained = resumed.state("", empty, only="outlet.weight", run="train", action="step", rank=1)
    not_saved = trained.alter(gone, action="save", rank=1)
    assert not_saved.findings("resume") == []


def first_steps(story: Story) -> tuple[StepInfo, ...]:
    """Return the steps that rank 0's optimizer takes in the first step of the training."""
    return story.trace.run().at("step", 0)[0].steps


@pytest.mark.parametrize("cell", CELLS)
def test_training_again_is_no_load(sound: Sound, cell: str) -> None:
    story = sound(cell)
    steps = first_steps(story) * 3
    message = "the optimizer took 3 steps with gradients during the load"
    changed = story.snapshot("load", {"steps": steps}, run="resume", rank=1)
    assert changed.findings("resume") == [
        f"rank 1: {message}; expected the state to be read from the checkpoint, not trained again"
    ]


@pytest.mark.parametrize(("square", "many"), [(0.0, 9), (1.0, 2), (float("nan"), 1)])
def test_a_load_may_step_to_make_room_for_the_state(sound: Sound, square: float, many: int) -> None:
    # torch does so, with gradients of zero; torch 2.2 with ones that were never filled.
    story = sound("fsdp2-fp32-w2")
    (step,) = first_steps(story)
    steps = (replace(step, square=square),) * many
    changed = story.snapshot("load", {"steps": steps}, run="resume")
    assert changed.findings("resume") == []


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_infinite_losses_are_no_agreement(sound: Sound, number: float) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"loss": number}, rank=1)
    story = story.snapshot("step", {"loss": number}, run="resume", rank=1)
    assert story.findings("resume") == [f"rank 1: the loss of step 1 is {number}; expected a finite number"]


@pytest.mark.parametrize("cell", CELLS)
def test_the_optimizer_holds_other_tensors_after_the_load(sound: Sound, cell: str) -> None:
    story = sound(cell).optimizer({"foreign": 2, "entries": 3}, run="resume", action="load", rank=1)
    assert story.findings("resume") == [
        "rank 1: 2 of 3 tensors in the optimizer are no parameters of the live model after the load (stale)"
    ]


@pytest.mark.parametrize("cell", ["fsdp2-bf16_upcast-w2", "ddp-fp32-w2-save_only_model"])
def test_the_load_freezes_one_parameter_and_unfreezes_another(sound: Sound, cell: str) -> None:
    where = {"run": "resume", "action": "load", "rank": 0}
    story = sound(cell).parameters({"trainable": False}, only="outlet.weight", **where)
    story = story.parameters({"trainable": True}, only="frozen.weight", **where)
    assert story.findings("resume") == [
        f"rank 0: parameter {story.live('outlet.weight')!r}: frozen after the load, and trained before",
        f"rank 0: parameter {story.live('frozen.weight')!r}: trainable after the load, and frozen before",
    ]


def test_a_module_is_in_another_mode_after_the_load(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"evaluating": ("frozen",)})
    message = (
        "1 modules are in training mode in step 1 after the load, first 'frozen'; "
        "in evaluation mode in the run that never stopped"
    )
    assert story.findings("resume") == [f"rank 0: {message}", f"rank 1: {message}"]
    changed = story.snapshot("step", {"evaluating": ("frozen",)}, run="resume")
    assert changed.findings("resume") == []
