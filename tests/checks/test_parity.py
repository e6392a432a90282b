"""Check ``parity`` on hand-made traces: another model is trained than in one process."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.checks import CHECKS, tolerances
from pytest_distcompat.driver import Driver
from pytest_distcompat.ext.upstream.sweep.law import SWEEP
from pytest_distcompat.models import MODELS, known_model
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.checks.traces import Sound, Story

    from pytest_distcompat.trace import Snapshot, StepInfo

CELLS = ("ddp-fp32-w2", "fsdp2-bf16_upcast-w2", "zero1-fp16_mixed-w2", "zero3-bf16_pure-w4", "fsdp1-fp8-w2")


def scaled(story: Story, field: str, factor: float, **where: Any) -> Story:
    """Return the story with a number that is larger by that factor."""

    def change(snapshot: Snapshot) -> Snapshot:
        larger = getattr(snapshot, field) * factor
        return replace(snapshot, **{field: larger})

    return story.alter(change, action="step", **where)


def test_a_loss_that_is_off_from_the_first_step(sound: Sound) -> None:
    # The sum over two ranks instead of the mean.
    off = "step 1: the loss is 3; 1.5 in the reference (1.0e+00 off, 2.0e-05 allowed)"
    factor = "2 times the reference's (= the number of ranks)"
    story = scaled(sound("ddp-fp32-w2"), "loss", 2)
    assert story.findings("parity") == [f"{off}: {factor}"]


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (1 / 2, ": 0.5 times the reference's (= 1 / the number of ranks)"),
        (4, ": 4 times the reference's (= micro-batches a step)"),
        (1 / 4, ": 0.25 times the reference's (= 1 / micro-batches a step)"),
        (3, ""),
    ],
)
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_plain_factor_is_named(sound: Sound, field: str, factor: float, cause: str) -> None:
    story = sound("ddp-fp32-w2-grad_accum_4")
    if field == "loss":
        story = scaled(story, "grad_norm", 2)
        start = "step 1: the loss is"
    else:
        start = "step 1: rank 0: the gradient norm is"
    changed = scaled(story, field, factor)
    (finding,) = [finding for finding in changed.findings("parity") if finding.startswith(start)]
    assert finding.endswith(f" allowed){cause}")


@pytest.mark.parametrize(
    ("cell", "cause"),
    [("ddp-fp32-w2", "the number of ranks or micro-batches a step"), ("ddp-fp32-w3", "micro-batches a step")],
)
def test_a_trainer_that_accumulates_unasked(sound: Sound, cell: str, cause: str) -> None:
    """The model was called twice in a step: the factor 2 may be that."""
    story = scaled(sound(cell), "loss", 2).snapshot("step", {"inputs": ("1", "2")})
    first, *_ = story.findings("parity")
    assert first.endswith(f" allowed): 2 times the reference's (= {cause})")


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w4", "fsdp2-fp32-w4-tp_2"])
def test_losses_that_are_parts_of_a_sum(sound: Sound, cell: str) -> None:
    story = sound(cell)
    changed = scaled(story, "loss", 1 / story.cell.dp_size)
    assert changed.findings("parity") == []


def test_parts_of_a_sum_must_add_up_in_each_step(sound: Sound) -> None:
    story = scaled(sound("ddp-fp32-w2"), "loss", 1 / 2)
    changed = scaled(story, "loss", 1.5, nth=4)
    (finding,) = changed.findings("parity")
    assert finding.startswith("step 5: the loss is ")


def gradients_scaled(story: Story, factor: float, **where: Any) -> Story:
    """Return the story with larger gradients at the optimizer."""

    def change(step: StepInfo) -> StepInfo:
        return replace(step, square=step.square * factor**2)

    return steps_changed(story, change, action="step", **where)


def steps_changed(story: Story, change: Callable[[StepInfo], StepInfo], **where: Any) -> Story:
    """Return the story with other steps of the optimizer."""

    def change_snapshot(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, steps=tuple(map(change, snapshot.steps)))

    return story.alter(change_snapshot, **where)


@pytest.mark.parametrize("nth", [None, 4])
def test_parts_of_a_sum_with_other_gradients_are_wrong(sound: Sound, nth: int | None) -> None:
    """Divided by the tokens of all ranks, and averaged over ranks: https://github.com/pytorch/torchtitan/pull/2318."""
    story = scaled(sound("ddp-fp32-w2"), "loss", 1 / 2)
    changed = gradients_scaled(story, 1 / 2, nth=nth)
    (finding,) = changed.findings("parity")
    assert finding.endswith(": 0.5 times the reference's (= 1 / the number of ranks)")


def test_parts_of_a_sum_with_clipped_gradients_need_their_norm(sound: Sound) -> None:
    """The reference of these traces clips a norm of 2 to 1, which gradients of any other norm would be clipped to."""
    story = scaled(sound("ddp-fp32-w2"), "loss", 1 / 2)
    unreported = story.snapshot("step", {"grad_norm": None})
    assert unreported.findings("parity") != []
    unclipped = in_reference(unreported, {"grad_norm": 1.0})
    assert unclipped.findings("parity") == []


def in_reference(story: Story, changes: dict[str, Any]) -> Story:
    """Return the story with other fields in all snapshots of the reference run."""
    return story.alter(lambda snapshot: replace(snapshot, **changes), run="reference")


def test_a_loss_that_is_a_mean_with_other_weights_says_with_which(sound: Sound) -> None:
    averages = {"each token": 1.5, "each rank": 3.0, "each micro-batch": 2.0}
    story = in_reference(sound("ddp-fp32-w2"), {"averages": averages})
    for factor, cause in (
        (2, ": here each rank counts alike, there each token"),
        (4, ": here each rank counts alike, times 2, the number of ranks, there each token"),
        (3, ""),
    ):
        changed = scaled(story, "loss", factor)
        (finding,) = changed.findings("parity")
        assert finding.endswith(f"2.0e-05 allowed){cause}")


@pytest.mark.parametrize(
    ("accumulate", "factor", "number"),
    [(2, 2, "ranks or of micro-batches a step"), (4, 2, "ranks"), (4, 4, "micro-batches a step")],
)
def test_a_loss_that_is_a_sum_says_of_what(sound: Sound, accumulate: int, factor: int, number: str) -> None:
    story = in_reference(sound(f"ddp-fp32-w2-grad_accum_{accumulate}"), {"averages": {"each token": 1.5}})
    changed = scaled(story, "loss", factor)
    (finding,) = changed.findings("parity")
    assert finding.endswith(f": here each token counts alike, times {factor}, the number of {number}, there each token")


def test_a_loss_that_is_a_little_off_is_no_mean_with_other_weights(sound: Sound) -> None:
    # The mean over tokens is between the two losses, and within the tolerance of both.
    averages = {"each token": 1.5 * (1 + 1.5e-5), "each rank": 3.0}
    story = in_reference(sound("ddp-fp32-w2"), {"averages": averages})
    changed = scaled(story, "loss", 1 + 2.5e-5)
    (finding,) = changed.findings("parity")
    assert finding.endswith("2.0e-05 allowed)")


def test_each_parameter_is_updated_with_the_numbers_of_the_reference(sound: Sound) -> None:
    """That a weight decays shows in a loss of float32 after a dozen steps, and in one of 16 bits never."""
    decayed = {"lr": 0.1, "weight_decay": 0.01}
    undecayed = {"lr": 0.1, "weight_decay": 0.0}

    def grouped(step: StepInfo) -> StepInfo:
        gradients = []
        for info in step.gradients:
            group = 0 if info.name == "inlet.weight" else 1
            gradients.append(replace(info, group=group))
        return replace(step, param_groups=(undecayed, decayed), gradients=tuple(gradients))

    def all_decayed(step: StepInfo) -> StepInfo:
        return replace(step, param_groups=(decayed, decayed))

    def without_gradients(step: StepInfo) -> StepInfo:
        return replace(step, gradients=())

    story = steps_changed(sound("fsdp2-bf16_upcast-w2"), grouped, action="step")
    story = steps_changed(story, grouped, run="reference")
    assert story.findings("parity") == []
    changed = steps_changed(story, all_decayed, rank=1, action="step")
    assert changed.findings("parity") == ["step 1: rank 1: weight_decay of inlet.weight is 0.01; 0 in the reference"]

    # Later steps have no single gradients, which say which group a parameter is in.
    for nth in range(5, 20):
        story = steps_changed(story, without_gradients, run="train", action="step", nth=nth)
        story = steps_changed(story, without_gradients, run="reference", action="reference", nth=nth)
    assert story.findings("parity") == []
    changed = steps_changed(story, all_decayed, action="step", nth=11)
    assert changed.findings("parity") == [
        "step 12: all ranks: weight_decay of inlet.weight is 0.01; 0 in the reference"
    ]


#: Field -> precision -> relative deviation from the reference; that of the other precisions is the default.
TOLERANCES = {
    "loss": defaultdict(lambda: 1e-3, fp32=2e-5, fp16_mixed=5e-4),
    "grad_norm": defaultdict(lambda: 1e-2, fp32=2e-4, fp16_mixed=5e-3),
}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_the_precision_says_how_far_off_is_too_far(sound: Sound, cell: str, field: str) -> None:
    story = sound(cell)
    tolerance = TOLERANCES[field][story.cell.precision]
    changed = scaled(story, field, 1 + tolerance / 4)
    assert changed.findings("parity") == []
    changed = scaled(story, field, 1.2, nth=19)
    assert changed.findings("parity") != []


def rounding(story: Story, off: float, *, field: str = "loss", step: int = 11) -> Story:
    """Return the story with a rounded reference run, in which one step deviates by that much."""
    exact = story.trace.run("reference")
    snapshots = []
    for snapshot in exact.snapshots:
        action = snapshot.action.replace("reference", "rounded")
        snapshots.append(replace(snapshot, action=action))
    deviating = snapshots[step]
    value = getattr(deviating, field) * (1 + off)
    snapshots[step] = replace(deviating, **{field: value})
    return story.with_run(replace(exact, name="rounded", snapshots=tuple(snapshots)))


@pytest.mark.parametrize("cell", ["ddp-bf16_upcast-w2", "fsdp2-fp16_mixed-w2"])
@pytest.mark.parametrize(("field", "off"), [("loss", 4e-3), ("grad_norm", 4e-2)])
@pytest.mark.parametrize("step", [1, 11, 19])
def test_a_model_that_rounds_more_than_ours(sound: Sound, cell: str, field: str, off: float, step: int) -> None:
    story = scaled(sound(cell), field, 1 + 1.9 * off, nth=8)
    precision = PRECISIONS.get(story.cell.precision)
    allowed = precision.loss_tolerance if field == "loss" else precision.norm_tolerance
    assert f"{allowed:.1e} allowed" in first_finding(story)
    rounds_a_little = rounding(story, allowed / 3, field=field, step=step)
    assert f"{2 * allowed:.1e} allowed" in first_finding(rounds_a_little)
    rounds_as_much = rounding(story, off, field=field, step=step)
    assert rounds_as_much.findings("parity") == []

    further_off = scaled(sound(cell), field, 1 + 2.2 * off, nth=8)
    rounds_less = rounding(further_off, off, field=field, step=step)
    assert f"{2 * off:.1e} allowed" in first_finding(rounds_less)


def first_finding(story: Story) -> str:
    return story.findings("parity")[0]


def test_a_training_that_rounding_leads_astray_is_judged_by_its_beginning(sound: Sound) -> None:
    for nth, allowed in ((2, "2.0e-03"), (8, "4.0e-01")):
        astray = scaled(sound("ddp-bf16_upcast-w2"), "loss", 3, nth=nth)
        story = rounding(astray, 0.2, step=11)
        assert f"{allowed} allowed" in first_finding(story)


@pytest.mark.parametrize("off", [float("nan"), float("inf"), 0.0, 1e-5])
def test_a_reference_that_cannot_be_computed_so_allows_no_more(sound: Sound, off: float) -> None:
    story = rounding(scaled(sound("ddp-bf16_upcast-w2"), "loss", 1.01, nth=8), off)
    partly = story.snapshot("rounded", {"loss": None, "grad_norm": None}, run="rounded")
    assert partly.findings("parity") == story.findings("parity")
    assert "2.0e-03 allowed" in first_finding(partly)


def contradicted(story: Story) -> Story:
    """Return the story with a second reference, whose losses are three times those of the first."""
    first = story.trace.run("reference")
    snapshots = []
    for snapshot in first.snapshots:
        loss = snapshot.loss
        if loss is not None:
            loss *= 3
        snapshots.append(replace(snapshot, loss=loss))
    return story.with_run(replace(first, name="other_reference", snapshots=tuple(snapshots)))


def findings_by_sweep(story: Story) -> list[str]:
    """Return the findings of ``parity`` by the law of cells with settings."""
    return SWEEP.findings(CHECKS.get("parity"), story.cell, story.trace)


def test_of_two_settings_that_contradict_each_other_either_may_win(sound: Sound) -> None:
    like_first = sound("zero2-fp32-w2")
    like_second = scaled(like_first, "loss", 3)
    assert findings_by_sweep(contradicted(like_first)) == []
    assert findings_by_sweep(contradicted(like_second)) == []


def test_of_two_settings_that_contradict_each_other_not_both_may_win(sound: Sound) -> None:
    mixed = scaled(sound("zero2-fp32-w2"), "loss", 3, nth=8)
    assert mixed.findings("parity") != []
    first, second = findings_by_sweep(contradicted(mixed))
    assert first.startswith("step 9: the loss is ")
    assert second.startswith("against the other of two settings that contradict each other: step 1: the loss is ")


def test_rounding_is_measured_for_models_that_are_not_ours(sound: Sound) -> None:
    class Own(Driver):
        """A trainer on a model of its own."""

    class Ours(Driver):
        """One on our models."""

        options = ("model",)

    def runs(driver: type[Driver], precision: str) -> list[str]:
        cell = sound(f"ddp-{precision}-w2").cell
        scenario = CHECKS.get("parity").runs(cell, driver)
        return [run.name for run in scenario.runs]

    assert runs(Own, "bf16_upcast") == ["train", "reference", "rounded"]
    assert runs(Own, "fp32") == ["train", "reference"]
    assert runs(Ours, "bf16_upcast") == ["train", "reference"]


def test_the_mean_over_the_ranks_is_what_counts(sound: Sound) -> None:
    def apart(snapshot: Snapshot) -> Snapshot:
        assert snapshot.loss is not None
        off = 0.5 if snapshot.rank else -0.5
        return replace(snapshot, loss=snapshot.loss + off)

    story = sound("fsdp2-fp32-w2").alter(apart, action="step")
    assert story.findings("parity") == []
    story = sound("fsdp2-fp32-w2").alter(apart, action="step", rank=1, nth=4)
    assert story.findings("parity") == ["step 5: the loss is 0.95; 0.7 in the reference (3.6e-01 off, 2.0e-05 allowed)"]


def test_only_the_first_deviating_step_is_reported(sound: Sound) -> None:
    story = scaled(sound("zero2-fp32-w2"), "loss", 1.1, nth=7)
    story = scaled(story, "grad_norm", 0.5, nth=11)
    (finding,) = story.findings("parity")
    assert finding.startswith("step 8:")


@pytest.mark.parametrize(
    ("norm", "finding"), [(4.0, "4; 2 in the reference (1.0e+00 off"), (float("nan"), "nan; 2 in")]
)
def test_a_norm_of_one_rank(sound: Sound, norm: float, finding: str) -> None:
    story = sound("fsdp1-fp32-w2").snapshot("step", {"grad_norm": norm}, nth=0, rank=1)
    (message,) = story.findings("parity")
    assert message.startswith(f"step 1: rank 1: the gradient norm is {finding}")


def test_a_trainer_need_not_report_a_norm(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"grad_norm": None})
    assert story.findings("parity") == []


@pytest.mark.parametrize(
    ("param_groups", "message"),
    [
        (({"lr": 0.05},), "0.05"),
        (({"lr": 0.1}, {"lr": 0.2}), "0.1, 0.2"),
        (({"weight_decay": 0.1},), "none"),
    ],
)
def test_a_learning_rate(sound: Sound, param_groups: tuple[dict[str, float], ...], message: str) -> None:
    story = sound("ddp-fp32-w2").optimizer({"param_groups": param_groups}, action="step", nth=9, rank=0)
    findings = story.findings("parity")
    if len(param_groups) == 2:
        # The reference has one group; the first of both is its.
        assert findings == []
    else:
        assert findings == [f"step 10: rank 0: the learning rate is {message}; 0.1 in the reference"]


@pytest.mark.parametrize(
    ("stepped", "scheduler", "findings"),
    [
        (0.2, "", []),
        (0.1, "", ["step 1: rank 0: the learning rate is 0.2; 0.1 in the reference"]),
        (0.2, "last_epoch=1", ["step 1: rank 0: the learning rate is 0.2; 0.1 in the reference"]),
    ],
)
def test_a_trainer_may_set_the_rate_as_a_step_begins(
    sound: Sound, stepped: float, scheduler: str, findings: list[str]
) -> None:
    """Without a scheduler it has the rate of the last step between two steps, the reference that of the next."""

    def step_with(rate: float) -> Callable[[Snapshot], Snapshot]:
        def change(snapshot: Snapshot) -> Snapshot:
            steps = tuple(replace(step, param_groups=({"lr": rate},)) for step in snapshot.steps)
            return replace(snapshot, steps=steps)

        return change

    story = sound("ddp-fp32-w2").alter(step_with(0.2), run="reference", action="reference", nth=0)
    story = story.alter(step_with(stepped), action="step", nth=0)
    story = story.snapshot("step", {"scheduler": scheduler}, nth=0)
    story = story.optimizer({"param_groups": ({"lr": 0.2},)}, action="step", nth=0, rank=0)
    assert story.findings("parity") == findings


def test_a_trainer_may_keep_more_groups_of_one_rate(sound: Sound) -> None:
    story = sound("zero1-fp32-w2").optimizer({"param_groups": ({"lr": 0.1}, {"lr": 0.1})}, action="step")
    assert story.findings("parity") == []


def test_each_group_has_its_rate(sound: Sound) -> None:
    where: dict[str, Any] = {"run": "reference", "action": "reference"}
    story = sound("ddp-fp32-w2").optimizer({"param_groups": ({"lr": 0.1}, {"lr": 0.2})}, **where)
    assert story.findings("parity") == []
    story = story.optimizer({"param_groups": ({"lr": 0.1}, {"lr": 0.3})}, action="step", nth=0, rank=1)
    assert story.findings("parity") == ["step 1: rank 1: the learning rate is 0.1, 0.3; 0.1, 0.2 in the reference"]


def test_no_optimizer(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("step", {"optimizer": None}, nth=2, rank=1)
    # Nothing to compare is nothing found: ``optimizer`` speaks of that.
    assert story.findings("parity") == []


@pytest.mark.parametrize(("run", "action"), [("train", "step"), ("reference", "reference")])
def test_no_loss(sound: Sound, run: str, action: str) -> None:
    story = sound("ddp-fp32-w2").snapshot(action, {"loss": None}, run=run, nth=3, rank=0)
    assert story.findings("parity") == [
        "step 4: no loss to compare; expected step() to return it on every rank, and reference()"
    ]


def test_silence_is_no_proof(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").without("step", nth=5, rank=0)
    assert first_finding(story) == "rank 0: no report after step 6"
    story = sound("fsdp2-fp32-w2").without("reference", run="reference")
    assert story.findings("parity") == ["step 1: no reference to compare with"]


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_reference_of_zero(sound: Sound, field: str) -> None:
    story = sound("ddp-fp32-w2").snapshot("reference", {field: 0.0}, run="reference", nth=4)
    assert re.search(r"^step 5: .*; 0 in the reference \(.* off, 2\.0e-0[45] allowed\)$", first_finding(story))
    # Of rounding, relative to the largest so far, there may be as much as elsewhere.
    changed = story.snapshot("step", {field: 1e-5}, nth=4)
    assert changed.findings("parity") == []
    changed = story.snapshot("step", {field: 0.0}, nth=4)
    assert changed.findings("parity") == []


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_all_is_zero_in_the_reference(sound: Sound, field: str) -> None:
    story = sound("ddp-fp32-w2").snapshot("reference", {field: 0.0}, run="reference")
    changed = story.snapshot("step", {field: 1e-9})
    assert "(inf off" in first_finding(changed)
    changed = story.snapshot("step", {field: 0.0})
    assert changed.findings("parity") == []


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_infinite_losses_are_no_agreement(sound: Sound, number: float) -> None:
    story = sound("ddp-fp32-w2").snapshot("reference", {"loss": number}, run="reference")
    changed = story.snapshot("step", {"loss": number})
    assert changed.findings("parity") == [
        f"step 1: rank 0: the loss of this step is {number}; expected a finite number",
        f"step 1: rank 1: the loss of this step is {number}; expected a finite number",
    ]
    on_one_rank = sound("fsdp2-fp32-w2").snapshot("step", {"loss": number}, nth=6, rank=1)
    assert on_one_rank.findings("parity") == [
        f"step 7: rank 1: the loss of this step is {number}; expected a finite number"
    ]
    assert f"step 1: the loss is 1.5; {number} in the reference (" in first_finding(story)


def test_infinite_norms_are_no_agreement(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").snapshot("reference", {"grad_norm": math.inf}, run="reference", nth=2)
    story = story.snapshot("step", {"grad_norm": math.inf}, nth=2, rank=0)
    story = story.snapshot("step", {"grad_norm": None}, rank=1)
    assert story.findings("parity") == [
        "step 3: rank 0: the gradient norm is inf; inf in the reference (nan off, 2.0e-04 allowed)"
    ]


def test_without_a_reference_the_report_says_what_to_write(sound: Sound) -> None:
    cell = sound("ddp-fp32-w2").cell
    expected = (
        "the driver has no reference() to compare with; write loss() and make_optimizer(), from which it is derived, "
        "or reference() itself"
    )
    for check in ("parity", "clipping"):
        assert CHECKS.get(check).not_applicable(cell, Driver) == expected


def test_the_reference_of_a_driver_with_loss_and_optimizer_is_derived(sound: Sound) -> None:
    torch = pytest.importorskip("torch")
    cell = sound("ddp-fp32-w2").cell

    class Half(Driver):
        max_norm = 0.5

        def loss(self, model: Any, number: int, rank: int) -> Any:
            gradient = 1 + number + 2 * rank
            return (model.weight * gradient).sum()

    class Whole(Half):
        def make_optimizer(self, model: Any) -> Any:
            return torch.optim.SGD(model.parameters(), lr=1.0)

        def make_scheduler(self, optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    for name in ("parity", "clipping"):
        check = CHECKS.get(name)
        reason = check.not_applicable(cell, Half)
        assert reason is not None
        assert "write make_optimizer(), from" in reason
        assert check.not_applicable(cell, Whole) is None
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 3.0)
    driver = Whole(cell, World(0, 1, 0, "cpu"))
    # The gradient is the mean of 1 and 3 in the first step, clipped from 2 to 0.5.
    assert driver.reference(model, 0, 2) == pytest.approx(6.0)
    assert driver.grad_norm == pytest.approx(2.0)
    assert model.weight.item() == pytest.approx(2.5)
    assert driver.reference(model, 1, 2) == pytest.approx(7.5)
    assert model.weight.item() == pytest.approx(2.45)


FLOAT32 = {"matmul": "ieee", "conv": "tf32"}
IN_TF32 = {"matmul": "tf32", "conv": "tf32"}


def multiplied(story: Story, before: dict[str, str], since: dict[str, str]) -> Story:
    """Return the story on a GPU, whose products were in one precision before the trainer was built, and are in another since."""
    changed = story.alter(lambda snapshot: replace(snapshot, products=since))
    return changed.snapshot("build_model", {"products": before})


def test_products_in_tf32_have_the_tolerances_of_float16(sound: Sound) -> None:
    off = scaled(sound("fsdp2-fp32-w2"), "loss", 1 + 2.7e-5, nth=0)
    assert off.findings("parity") != []
    story = multiplied(off, FLOAT32, FLOAT32)
    assert story.findings("parity") == off.findings("parity")
    story = multiplied(off, FLOAT32, IN_TF32)
    assert story.findings("parity") == []
    norms = scaled(sound("fsdp2-fp32-w2"), "grad_norm", 1 + 1e-3, nth=0)
    assert norms.findings("parity") != []
    story = multiplied(norms, FLOAT32, IN_TF32)
    assert story.findings("parity") == []


def test_a_finding_says_that_products_are_in_tf32(sound: Sound) -> None:
    off = scaled(sound("fsdp2-fp32-w2"), "loss", 1.01, nth=0)
    story = multiplied(off, FLOAT32, IN_TF32)
    (finding,) = story.findings("parity")
    assert finding.endswith("5.0e-04 allowed); products of float32 are in TF32 since build")
    story = multiplied(off, IN_TF32, IN_TF32)
    (finding,) = story.findings("parity")
    assert finding.endswith("5.0e-04 allowed); products of float32 are in TF32")


@pytest.mark.parametrize(
    ("cell", "allowed", "on_gpu"),
    [
        ("zero3-bf16_upcast-w2-model_mlp", "2.2e-03", "3.0e-03"),
        # Measured within them on a GPU too.
        ("zero3-bf16_upcast-w2", "1.0e-03", "1.0e-03"),
        ("fsdp2-fp16_mixed-w2-model_mlp", "1.1e-03", "1.1e-03"),
        ("zero3-fp32-w2-model_mlp", "2.0e-05", "2.0e-05"),
        # More than that is allowed already.
        ("zero3-bf16_upcast-w2-model_wide", "1.0e-02", "1.0e-02"),
    ],
)
def test_the_loss_of_a_small_model_in_bfloat16_may_be_off_more_on_a_gpu(
    sound: Sound, cell: str, allowed: str, on_gpu: str
) -> None:
    off = scaled(sound(cell), "loss", 1.1, nth=3)
    assert f"(1.0e-01 off, {allowed} allowed)" in first_finding(off)
    story = multiplied(off, FLOAT32, FLOAT32)
    assert f"(1.0e-01 off, {on_gpu} allowed)" in first_finding(story)
    # As the losses of a GPU and of the reference once were.
    off = scaled(sound(cell), "loss", 1.67421 / 1.67055, nth=3)
    story = multiplied(off, FLOAT32, FLOAT32)
    findings = story.findings("parity")
    if float(on_gpu) > 2.2e-3:
        assert findings == []
    else:
        assert findings != []


def test_without_the_built_in_models_every_driver_has_its_own(sound: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    story = sound("ddp-bf16_upcast-w2")
    with_models = tolerances(story.cell, story.trace)
    monkeypatch.setitem(vars(MODELS), "by_name", {})
    assert known_model(story.cell) is None
    assert tolerances(story.cell, story.trace) == with_models
    assert story.findings("parity") == []
