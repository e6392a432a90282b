"""Which reference a cell is compared with, and how far numbers may be from the reference's.

The reference is a run of one process in float32, without any wrapper, on the batches of all ranks
of the cell's own run. The checks ``parity``, ``clipping`` and ``gradients`` use this file, and so
does ``evidence.cells``, which draws the tolerances beside the curves of a report.

A tolerance is relative to the number of the reference. For a built-in model it comes from a table:
2e-5 for the loss in ``fp32``, 1e-3 in ``bf16_upcast``, times a factor of the model. For a model of
the user's driver a third run, ``rounded``, trains the reference under autocast, and its deviation
from the reference says how much rounding matters for that model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots
from pytest_distcompat.checks._factors import times_a_factor
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import rounding_of
from pytest_distcompat.models import TinyModel, known_model, model_of
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.scenario import PARITY, ROUNDED_PARITY, STEPS, Scenario
from pytest_distcompat.trace import RunTrace, Snapshot, Trace

#: For a model of the user's own, a trainer may deviate by this many times the deviation of the run
#: ``rounded``, or of the table: it rounds in other places, too. ``benchmarks/rounding.py`` measures
#: the factor on four small models.
ROUNDING_FACTOR = 2
#: Returns the number of a snapshot that is compared, such as its loss; None if it has none.
_NumberOf = Callable[[Snapshot], float | None]
_LAST = STEPS - 1
#: The last snapshots that ``parity`` and ``clipping`` need, for ``check(until=...)``: those after
#: the last step of each run, as (run, action, which one of that action).
WHOLE_RUNS = (("train", "step", _LAST), ("reference", "reference", _LAST))


def has_reference(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why a cell of a driver has no reference to compare with; None if it has one."""
    # A model that draws random numbers in its forward pass, such as those of dropout.
    if "model" in driver.options and model_of(cell).random:
        return "one process does not draw the random numbers of several ranks"
    if driver.can("reference"):
        return None
    missing = []
    for name in ("loss", "make_optimizer"):
        if not driver.can(name):
            missing.append(f"{name}()")
    methods = " and ".join(missing)
    return (
        "the driver has no reference() to compare with; "
        f"write {methods}, from which it is derived, or reference() itself"
    )


def reference_runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs to compare: ``train`` and ``reference``, for some also ``rounded``.

    How rounding moves the training of a built-in model is known. For a model of the driver's own
    the run ``rounded`` measures it.
    """
    has_own_model = "model" not in driver.options
    if has_own_model and PRECISIONS.get(cell.precision).compute != "float32":
        return ROUNDED_PARITY
    return PARITY


def tolerances(cell: Cell, trace: Trace) -> tuple[list[float], list[float]]:
    """Return the tolerances of the loss and of the gradient norm, one of each for each step.

    They are relative to the reference's number: ``([2e-5, 2e-5, ...], [2e-4, 2e-4, ...])``.
    """
    loss_tolerance, norm_tolerance = table_tolerances(cell, trace.run("train"))
    losses = allowed_deviations(loss_tolerance, trace, _loss)
    norms = allowed_deviations(norm_tolerance, trace, _grad_norm)
    return losses, norms


def table_tolerances(cell: Cell, run: RunTrace) -> tuple[float, float]:
    """Return the tolerances of the loss and of the gradient norm by the table, for any step.

    Args:
        cell: The cell.
        run: The run on the cell's ranks.
    """
    # The cell's precision, or a lower one where its optimizer or GPU rounds more.
    precision = rounding_of(cell, run)
    # The built-in model that the cell names; None for the driver's own.
    model = known_model(cell)
    loss_tolerance = precision.loss_tolerance * _spread(model, precision, run)
    norm_tolerance = precision.norm_tolerance
    if model is not None:
        norm_tolerance *= model.norm_spread
    return loss_tolerance, norm_tolerance


def _loss(snapshot: Snapshot) -> float | None:
    """Return the loss, as a ``_NumberOf``."""
    return snapshot.loss


def _grad_norm(snapshot: Snapshot) -> float | None:
    """Return the gradient norm before clipping, as a ``_NumberOf``."""
    return snapshot.grad_norm


def _spread(model: TinyModel | None, precision: Precision, run: RunTrace) -> float:
    """Return the factor on the tolerance of losses that a built-in model has, 1.0 for others.

    A GPU rounds sums of bfloat16 products otherwise, so the factor may be larger on one.
    """
    if model is None or precision.compute == "float32":
        return 1.0
    if run.on_gpu and precision.compute == "bfloat16":
        return max(model.spread, model.gpu_spread)
    return model.spread


def allowed_deviations(table: float, trace: Trace, number: _NumberOf) -> list[float]:
    """Return the tolerance of a number for each step, relative to the reference's number.

    Without a run ``rounded`` it is that of the table. With it, it is ``ROUNDING_FACTOR`` times the
    larger of the table's and of how far that run was from the reference.

    Args:
        table: The tolerance of the table.
        trace: The runs.
        number: Returns the number of a snapshot that is compared.
    """
    rounded_run = trace.runs.get("rounded")
    reference_run = trace.run("reference")
    if rounded_run is None:
        return [table] * STEPS
    deviations: list[float] = []
    for step in range(STEPS):
        deviation = 0.0
        # A run of one process has one snapshot of a step, or none if it ended before.
        references = reference_run.at("reference", step)
        rounded = rounded_run.at("rounded", step)
        if len(references) == 1 and len(rounded) == 1:
            reference_number = number(references[0])
            deviation = _relative_deviation(number(rounded[0]), reference_number)
        deviations.append(deviation)
    allowed: list[float] = []
    for step in range(STEPS):
        # What was measured until about twice this step: in steps 0 to 2 for step 0, in steps 0 to 4
        # for step 1. Rounding that grows in late steps must not excuse a deviation in early ones;
        # but the trainer's rounding may show a little earlier than that of the run ``rounded``.
        measured = max(deviations[: 2 * step + 3])
        allowed.append(ROUNDING_FACTOR * max(table, measured))
    return allowed


def _relative_deviation(number: float | None, reference: float | None) -> float:
    """Return how far a number is from the reference's, relative to it.

    It is 0 if a number is missing, infinite, or 0 in the reference: such a pair measures nothing.
    """
    if not reference or number is None:
        return 0.0
    deviation = abs(reference - number) / abs(reference)
    if not math.isfinite(deviation):
        return 0.0
    return deviation


@dataclass(frozen=True)
class Allowance:
    """How far a number of one step may be from the reference's.

    Attributes:
        tolerance: The tolerance, relative to the reference's number: 1e-3.
        largest: The reference's largest number in the steps so far. The tolerance is relative to it
            in a step in which the reference's number is 0.
    """

    tolerance: float
    largest: float

    def covers(self, number: float, reference: float) -> bool:
        """Tell whether both numbers are finite, and close enough."""
        if not math.isfinite(number) or not math.isfinite(reference):
            return False
        absolute = 0.0
        if not reference:
            absolute = self.tolerance * self.largest
        return math.isclose(number, reference, rel_tol=self.tolerance, abs_tol=absolute)

    def deviation(self, number: float, reference: float) -> str:
        """Return the words for a deviation: ``0.69 in the reference (1.0e+00 off, ...)``.

        A finding has the number itself before them.
        """
        size = abs(reference) or self.largest
        deviation = math.inf
        if size:
            deviation = abs(number - reference) / size
        comparison = f"{deviation:.1e} off, {self.tolerance:.1e} allowed"
        return f"{reference:.6g} in the reference ({comparison})"


def optimizer_norm(snapshot: Snapshot) -> float:
    """Return the norm of the gradients that the optimizer got on this rank, after clipping.

    A trainer with several optimizers has several optimizer steps in one step; they count together.
    """
    squares = [step.square for step in snapshot.steps]
    return math.sqrt(sum(squares))


def other_norms(
    snapshots: Snapshots,
    reference: Snapshot,
    allowance: Allowance,
    factors: Mapping[str, int],
) -> Iterator[str]:
    """Yield a finding for each rank that reports another gradient norm than the reference.

    A rank that reports none has no finding.

    Args:
        snapshots: Those of all ranks after a step.
        reference: The snapshot of the reference after the same step.
        allowance: How far the norm may be off.
        factors: Name -> number that a wrong norm may be multiplied by: ``{"the number of ranks":
            2}``. If one fits, the finding names it.
    """
    expected = reference.grad_norm
    if expected is None:
        return
    for snapshot in snapshots:
        norm = snapshot.grad_norm
        if norm is None or allowance.covers(norm, expected):
            continue
        cause = times_a_factor(norm, expected, factors, allowance.tolerance)
        deviation = allowance.deviation(norm, expected)
        text = f"the gradient norm is {norm:.6g}; {deviation}{cause}"
        yield f"rank {snapshot.rank}: {text}"
