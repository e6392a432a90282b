"""Check ``again``: a second training in the same trainer equals that of one process.

Users train in stages, go on after an early stop, or search for hyperparameters with one trainer
object. Its wrapper, its optimizer and its scheduler then exist already: a trainer may wrap the
model twice, go on with a spent schedule, or step an optimizer of parameters that are no longer
trained.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``fsdp2-fp32-w2``, and a trace of two runs (a run is one process group from start to
end):

- ``again``, on the cell's ranks: a training of 5 steps, with a save after 3; a second training of 3
  steps (action ``again``); and one that loads that save and takes 2 steps, in one trainer object.
- ``again_reference``, in one process, in float32 and without any wrapper: the first two trainings.

For each rank and action there is a snapshot: losses, gradient norms, learning rates, and digests
(hashes) of what the rank holds. The check yields findings, such as ``step 1 of the second training:
the learning rate is 0.0008; 0.001 in the reference``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None;
``depends_on`` has the facets of a cell (precision, world size, options) on which the outcome
depends beside the strategy, in this check none: so the default profile tests only one cell of each
strategy; ``costly`` says that the check needs several runs of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks._factors import factors_of
from pytest_distcompat.checks._hyperparameters import other_rates
from pytest_distcompat.checks._losses import add_up, other_loss, times_ranks
from pytest_distcompat.checks._reference import (
    Allowance,
    has_reference,
    other_norms,
    table_tolerances,
)
from pytest_distcompat.checks._repeated_steps import first_other_step
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import differences, settings, values
from pytest_distcompat.scenario import AGAIN, SAVED
from pytest_distcompat.trace import RunTrace, Trace

#: The steps of the first and the second training, and of the one that loads the save.
FIRST_STEPS, SECOND_STEPS, LOADED_STEPS = 5, 3, 2


def _tested_elsewhere(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    if not driver.can("again"):
        return "the driver has no again(), which begins a second training in the same trainer"
    # The cell may name any model, but no other option.
    others = [name for name, _ in cell.options if name != "model"]
    if cell.precision != "fp32" or others:
        return "a second training is tried in fp32 and without that option"
    return has_reference(cell, driver)


@check(
    scenario=AGAIN,
    # The steps of a run are counted over all its trainings.
    until=(
        ("again", "step", FIRST_STEPS + SECOND_STEPS + LOADED_STEPS - 1),
        ("again_reference", "reference", FIRST_STEPS + SECOND_STEPS - 1),
    ),
    order=10,
    not_applicable=_tested_elsewhere,
    costly=True,
    depends_on=frozenset(),
)
def again(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a second training in one trainer equals that of one process with the same calls.

    A trainer that has trained trains again, from the first batch on, with a schedule that begins
    anew: its losses, gradient norms and learning rates are those of one process in float32 that
    does the same, with the optimizer that it had. Then the trainer loads a checkpoint of its first
    training: all is bit by bit what was saved, and the next steps are those that followed the save.

    If it fails: the second training wraps the model again, goes on with the schedule of the first
    one, or steps an optimizer whose parameters are no longer the model's; or a load restores only
    what a new trainer lacks.
    """
    run = trace.run("again")
    reference = trace.run("again_reference")
    second = list(_second_training(cell, run, reference))
    yield from second
    saved = run.at("save")
    loaded = run.at("load")
    when = "after the load in the trainer that saved"
    yield from every_rank(saved, cell.world_size, "the save")
    yield from every_rank(loaded, cell.world_size, "the load in the trainer that saved")
    yield from differences(values(run, saved), values(run, loaded), when)
    yield from settings(saved, loaded, when)
    # The steps that followed the save at first, and those after it was loaded.
    first_time = []
    repeated = []
    for nth in range(LOADED_STEPS):
        first_time.append(run.at("step", SAVED + nth))
        repeated.append(run.at("step", FIRST_STEPS + SECOND_STEPS + nth))
    yield from first_other_step(first_time, repeated, when, "when it was saved")


def _second_training(cell: Cell, run: RunTrace, reference: RunTrace) -> Iterator[str]:
    """Yield findings for the first step of the second training that is not the reference's."""
    yield from every_rank(run.at("again"), cell.world_size, "the start of the second training")
    # How far numbers may be from the reference's in this precision, relatively.
    loss_tolerance, norm_tolerance = table_tolerances(cell, run)
    # Numbers by which a wrong loss may be multiplied: ``{"the number of ranks": 2}``.
    factors = factors_of(cell, run)
    first_references = reference.at("reference")
    # The ranks' losses may add up to the reference's, instead of having it as their mean. Whether
    # the gradients are right all the same is for the check ``parity`` to say.
    losses_add_up = bool(first_references) and add_up(
        cell, run.at("step"), first_references[0], loss_tolerance
    )
    for nth in range(SECOND_STEPS):
        step = f"step {nth + 1} of the second training"
        snapshots = run.at("step", FIRST_STEPS + nth)
        references = reference.at("reference", FIRST_STEPS + nth)
        yield from every_rank(snapshots, cell.world_size, step)
        if not snapshots or not references:
            yield f"{step}: no reference to compare with"
            return
        if losses_add_up:
            snapshots = tuple(times_ranks(snapshot, cell) for snapshot in snapshots)
        loss_allowance = Allowance(loss_tolerance, abs(references[0].loss or 0.0))
        norm_allowance = Allowance(norm_tolerance, abs(references[0].grad_norm or 0.0))
        findings = [
            *other_loss(cell, snapshots, references[0], loss_allowance, factors),
            *other_norms(snapshots, references[0], norm_allowance, factors),
            *other_rates(snapshots, references[0]),
        ]
        for finding in findings:
            yield f"{step}: {finding}"
        if findings:
            # Later deviations follow from this one.
            return
