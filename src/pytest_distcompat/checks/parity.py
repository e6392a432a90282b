"""Does the cell train the same model as one process in float32 at the same learning rate?"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank, finite_losses
from pytest_distcompat.checks._factors import factors_of, named_factor
from pytest_distcompat.checks._tied import tied_apart
from pytest_distcompat.driver import Driver
from pytest_distcompat.excerpt import listed
from pytest_distcompat.model_values import Names, across_stages, in_tf32, rounding_of, stages_of
from pytest_distcompat.models import TinyModel, known_model, model_of
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.scenario import PARITY, ROUNDED_PARITY, STEPS, Scenario
from pytest_distcompat.trace import RunTrace, Snapshot, Trace, shard_groups, together
from pytest_distcompat.wording import named_ranks

#: A trainer may deviate by so many times what rounding does to the reference, or what the table
#: allows: it rounds in other places too. ``benchmarks/rounding.py`` measures it on four small
#: models.
ROUNDING_FACTOR = 2
#: Relative, for learning rates, which are products of a few factors.
RATE_TOLERANCE = 1e-9
#: Relative: a gradient norm from before clipping that differs less from the one after it was not
#: clipped.
UNCLIPPED = 1e-3
#: What single parameters are compared on; optimizers of other classes may have further numbers.
HYPERPARAMETERS = ("lr", "weight_decay", "betas.0", "betas.1", "eps", "momentum")
#: The hyperparameters of a param group, by name.
_GroupNumbers = Mapping[str, float]
#: Unwrapped name -> the numbers of the parameter's group.
_Numbers = Mapping[str, _GroupNumbers]
#: What is compared of each snapshot; None where it was not recorded.
_NumberOf = Callable[[Snapshot], float | None]
#: The checks need both runs up to the last step.
_LAST = STEPS - 1
_WHOLE = (("train", "step", _LAST), ("reference", "reference", _LAST))


def has_reference(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why there is no reference to compare with; None if there is one."""
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
    """Return the runs to compare.

    For a model of the driver's own one more run measures rounding, which is known for built-in
    ones.
    """
    has_own_model = "model" not in driver.options
    if has_own_model and PRECISIONS.get(cell.precision).compute != "float32":
        return ROUNDED_PARITY
    return PARITY


@check(scenario=reference_runs, until=_WHOLE, order=5, not_applicable=has_reference)
def parity(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that training equals that of one process in float32 on the same batches, over 20 steps.

    Loss and reported gradient norm agree within the precision's tolerance, learning rate, weight
    decay and the like of each parameter exactly. The ranks' losses are a mean if their average is
    the reference's; if instead their sum is, each rank reports its part of a sum, and gradients
    equal to the reference's in every step must prove it. Ranks, steps and micro-batches have
    different numbers of tokens, and the last step of an epoch has fewer micro-batches than the
    others.

    If it fails: a loss that is off from the first step on is computed differently, such as a mean
    of unequal micro-batches' means; the finding then says what counts alike. One that is off later
    comes from the optimizer: bfloat16 masters, gradients summed instead of averaged, another
    schedule.
    """
    loss_tolerances, norm_tolerances = tolerances(cell, trace)
    trained = trace.run("train")
    reference_run = trace.run("reference")
    trained_numbers = _NumbersOfParameters(trained)
    reference_numbers = _NumbersOfParameters(reference_run)
    factors = factors_of(cell, trained)
    losses_add_up = _parts_of_a_sum(cell, trace, loss_tolerances[0], norm_tolerances)
    largest_loss = 0.0
    largest_norm = 0.0
    # What may explain a number that is off, for the end of its finding.
    circumstances = in_tf32(trained) + tied_apart(cell, trained)
    for step in range(STEPS):
        name = f"step {step + 1}"
        snapshots = trained.at("step", step)
        references = reference_run.at("reference", step)
        yield from every_rank(snapshots, cell.world_size, name)
        if not snapshots or not references:
            yield f"{name}: no reference to compare with"
            return
        reference = references[0]
        if losses_add_up:
            snapshots = tuple(_times_ranks(snapshot, cell) for snapshot in snapshots)
        largest_loss = max(largest_loss, abs(reference.loss or 0.0))
        largest_norm = max(largest_norm, reference.grad_norm or 0.0)
        loss_allowance = _Allowance(loss_tolerances[step], largest_loss)
        norm_allowance = _Allowance(norm_tolerances[step], largest_norm)
        findings: list[str] = []
        for finding in _other_loss(cell, snapshots, reference, loss_allowance, factors):
            findings.append(finding + _same_rows(cell) + circumstances)
        for finding in _other_norms(snapshots, reference, norm_allowance, factors):
            findings.append(finding + circumstances)
        numbers_by_rank = trained_numbers.after_step(snapshots)
        expected_numbers = reference_numbers.after_step(references)
        other_rates = list(_other_rates(snapshots, reference))
        findings += other_rates
        if not other_rates:
            findings += _other_hyperparameters(cell, snapshots, numbers_by_rank, expected_numbers)
        for finding in findings:
            yield f"{name}: {finding}"
        if findings:
            return  # later deviations follow from this one


def _parts_of_a_sum(
    cell: Cell, trace: Trace, tolerance: float, norm_tolerances: Sequence[float]
) -> bool:
    """Tell whether the ranks' losses add up to the reference's, and training equals it.

    Such a trainer divides by the tokens of all ranks and sums gradients over ranks. One that
    divides so and averages gradients has the same losses, and gradients that are too small.
    """
    snapshots = trace.run("train").at("step", 0)
    references = trace.run("reference").at("reference", 0)
    losses = _losses(snapshots)
    if cell.dp_size == 1 or not losses or len(losses) != len(snapshots):
        return False
    if not references or references[0].loss is None:
        return False
    total = cell.dp_size * sum(losses) / len(losses)
    if not math.isclose(total, references[0].loss, rel_tol=tolerance):
        return False
    if not _shows_gradients(trace, norm_tolerances):
        return False
    return not any(clipping(cell, trace))


def _losses(snapshots: Snapshots) -> list[float]:
    """Return the losses that ranks reported; a rank may have reported none."""
    losses: list[float] = []
    for snapshot in snapshots:
        if snapshot.loss is not None:
            losses.append(snapshot.loss)
    return losses


def _shows_gradients(trace: Trace, tolerances: Sequence[float]) -> bool:
    """Tell whether gradients are known to be the reference's before clipping.

    After clipping wrong gradients may have the same norm.
    """
    trained = trace.run("train")
    reference_run = trace.run("reference")
    for step, tolerance in enumerate(tolerances):
        references = reference_run.at("reference", step)
        if not references:
            return False
        if not _shows_gradients_of_step(trained.at("step", step), references[0], tolerance):
            return False
    return True


def _shows_gradients_of_step(snapshots: Snapshots, reference: Snapshot, tolerance: float) -> bool:
    """Tell whether the gradients of a step are known to be the reference's before clipping."""
    expected = reference.grad_norm
    if expected is None:
        return False
    # A norm that a rank reports is that before clipping.
    lacks_norms = False
    for snapshot in snapshots:
        norm = snapshot.grad_norm
        if norm is None:
            lacks_norms = True
        elif not math.isclose(norm, expected, rel_tol=tolerance):
            return False
    if not lacks_norms:
        return True
    # Else ``clipping`` compares norms after it, which shows as much where nothing was clipped.
    return math.isclose(_optimizer_norm(reference), expected, rel_tol=UNCLIPPED)


def _times_ranks(snapshot: Snapshot, cell: Cell) -> Snapshot:
    """Return the snapshot with the loss as it would be if losses were means over ranks."""
    if snapshot.loss is None:
        return snapshot
    loss = snapshot.loss * cell.dp_size
    return dataclasses.replace(snapshot, loss=loss)


def tolerances(cell: Cell, trace: Trace) -> tuple[list[float], list[float]]:
    """Return for each step how far loss and gradient norm may be from the reference.

    Both are relative to the reference's number.
    """
    precision = rounding_of(cell, trace.run())
    model = known_model(cell)
    loss_tolerance = precision.loss_tolerance * _spread(model, precision, trace.run())
    norm_tolerance = precision.norm_tolerance
    if model is not None:
        norm_tolerance *= model.norm_spread
    losses = _allowed(loss_tolerance, trace, _loss)
    norms = _allowed(norm_tolerance, trace, _grad_norm)
    return losses, norms


def _loss(snapshot: Snapshot) -> float | None:
    return snapshot.loss


def _grad_norm(snapshot: Snapshot) -> float | None:
    return snapshot.grad_norm


def _spread(model: TinyModel | None, precision: Precision, run: RunTrace) -> float:
    """Return the model's factor on the tolerance of losses.

    It is larger where a GPU adds up products of bfloat16.
    """
    if model is None or precision.compute == "float32":
        return 1.0
    if run.on_gpu and precision.compute == "bfloat16":
        return max(model.spread, model.gpu_spread)
    return model.spread


def _allowed(table: float, trace: Trace, number: _NumberOf) -> list[float]:
    """Return for each step how far the number may be from the reference, relative to it.

    That is by the table, or as measured.
    """
    rounded_run = trace.runs.get("rounded")
    reference_run = trace.run("reference")
    if rounded_run is None:
        return [table] * STEPS
    deviations: list[float] = []
    for step in range(STEPS):
        deviation = 0.0
        references = reference_run.at("reference", step)
        rounded = rounded_run.at("rounded", step)
        if len(references) == 1 and len(rounded) == 1:
            reference_number = number(references[0])
            deviation = _relative_deviation(number(rounded[0]), reference_number)
        deviations.append(deviation)
    allowed: list[float] = []
    for step in range(STEPS):
        # Measured up to that step and a little beyond, for the trainer's rounding may show earlier;
        # later steps do not count.
        measured = max(deviations[: 2 * step + 3])
        allowed.append(ROUNDING_FACTOR * max(table, measured))
    return allowed


def _relative_deviation(number: float | None, reference: float | None) -> float:
    """Return how far a number is from the reference's, relative to it.

    0 where that says nothing.
    """
    if not reference or number is None:
        return 0.0
    deviation = abs(reference - number) / abs(reference)
    if not math.isfinite(deviation):
        return 0.0
    return deviation


@dataclass(frozen=True)
class _Allowance:
    """How far a number may be from the reference's.

    Attributes:
        tolerance: Relative to the reference's number.
        largest: The reference's largest number in the steps so far: where its number is 0 the
            tolerance is relative to it.
    """

    tolerance: float
    largest: float

    def covers(self, number: float, reference: float) -> bool:
        """Tell whether both are finite and close."""
        if not math.isfinite(number) or not math.isfinite(reference):
            return False
        absolute = 0.0
        if not reference:
            absolute = self.tolerance * self.largest
        return math.isclose(number, reference, rel_tol=self.tolerance, abs_tol=absolute)

    def deviation(self, number: float, reference: float) -> str:
        """Return the words for a number's deviation, for a finding that begins with the number."""
        size = abs(reference) or self.largest
        deviation = math.inf
        if size:
            deviation = abs(number - reference) / size
        comparison = f"{deviation:.1e} off, {self.tolerance:.1e} allowed"
        return f"{reference:.6g} in the reference ({comparison})"


def _other_loss(
    cell: Cell,
    snapshots: Snapshots,
    reference: Snapshot,
    allowance: _Allowance,
    factors: Mapping[str, int],
) -> Iterator[str]:
    """Yield a finding if the average of the ranks' losses is not the reference's loss.

    The finding has the cause if it is a known one.
    """
    losses = _losses(snapshots)
    if len(losses) != len(snapshots) or reference.loss is None:
        yield "no loss to compare; expected step() to return it on every rank, and reference()"
        return
    infinite = list(finite_losses(snapshots, "this step"))
    if infinite:
        yield from infinite
        return
    loss = sum(losses) / len(losses)
    if allowance.covers(loss, reference.loss):
        return
    cause = _other_average(cell, loss, reference, allowance.tolerance)
    if not cause:
        cause = _times_a_factor(loss, reference.loss, factors, allowance.tolerance)
    deviation = allowance.deviation(loss, reference.loss)
    yield f"the loss is {loss:.6g}; {deviation}{cause}"


def _other_average(cell: Cell, loss: float, reference: Snapshot, tolerance: float) -> str:
    """Return what counts alike in the loss and in the reference's, if they are unlike means.

    An empty text if the loss is no mean with other weights.

    The mean may be multiplied by the number of data parallel ranks, as a loss is that is meant to
    be a sum of their shares, or by that of micro-batches.
    """
    reference_weights = _equal_weights(reference.loss or 0.0, reference, tolerance)
    if not reference_weights:
        return ""
    reference_weight = reference_weights[0]
    weights = _equal_weights(loss, reference, tolerance)
    if not set(weights).isdisjoint(reference_weights):
        return ""
    if weights:
        return f": here {weights[0]} counts alike, there {reference_weight}"
    names_by_factor: dict[int, list[str]] = defaultdict(list)
    names_by_factor[cell.dp_size].append("ranks")
    names_by_factor[int(cell.option("grad_accum"))].append("micro-batches a step")
    for factor, names in names_by_factor.items():
        weights = _equal_weights(loss / factor, reference, tolerance)
        if weights:
            product = f"times {factor}, the number of {' or of '.join(names)}"
            return f": here {weights[0]} counts alike, {product}, there {reference_weight}"
    return ""


def _equal_weights(loss: float, reference: Snapshot, tolerance: float) -> list[str]:
    """Return the names of what counts alike in a loss, such as each token.

    The average over each of them is this loss.
    """
    names = []
    for name, average in reference.averages.items():
        if math.isclose(loss, average, rel_tol=tolerance):
            names.append(name)
    return names


def _times_a_factor(
    number: float, reference: float, factors: Mapping[str, int], tolerance: float
) -> str:
    """Return which plain factor a number is off by, as ``gradients`` says it.

    An empty text if it is off by none.
    """
    ratio = math.inf
    if reference:
        ratio = number / reference
    factor = named_factor(factors, ratio, tolerance)
    if not factor:
        return ""
    return f": {ratio:.4g} times the reference's ({factor})"


def _same_rows(cell: Cell) -> str:
    """Return what no check can compare under context parallelism.

    Its ranks see only parts of rows. An empty text without it.
    """
    if cell.cp == 1:
        return ""
    ranks = ", ".join(str(rank) for rank in cell.cp_peers(0))
    return f"; with cp {cell.cp} ranks {ranks} must be fed parts of the same rows"


def _other_norms(
    snapshots: Snapshots,
    reference: Snapshot,
    allowance: _Allowance,
    factors: Mapping[str, int],
) -> Iterator[str]:
    """Yield a finding for each rank that reports another gradient norm than the reference.

    A trainer may report none.
    """
    expected = reference.grad_norm
    if expected is None:
        return
    for snapshot in snapshots:
        norm = snapshot.grad_norm
        if norm is None or allowance.covers(norm, expected):
            continue
        cause = _times_a_factor(norm, expected, factors, allowance.tolerance)
        deviation = allowance.deviation(norm, expected)
        text = f"the gradient norm is {norm:.6g}; {deviation}{cause}"
        yield f"rank {snapshot.rank}: {text}"


def _other_rates(snapshots: Snapshots, reference: Snapshot) -> Iterator[str]:
    """Yield a finding for each rank with other learning rates than the reference."""
    expected = _rates(reference)
    for snapshot in snapshots:
        rates = _rates(snapshot)
        if not _same_rates(rates, expected):
            yield (
                f"rank {snapshot.rank}: the learning rate is {_listed(rates)}; "
                f"{_listed(expected)} in the reference"
            )


#: The learning rate of each param group; None for a group without one.
_Rates = list[float | None]


def _rates(snapshot: Snapshot) -> _Rates:
    return [group.get("lr") for group in snapshot.param_groups]


def _same_rates(rates: _Rates, expected: _Rates) -> bool:
    """Tell whether the learning rates of groups are equal, None and 0 too."""
    # A trainer may keep parameters in more groups than it was given.
    if len(set(expected)) == len(set(rates)) == 1:
        return _same_rate(rates[0], expected[0])
    for rate, expected_rate in zip(rates, expected, strict=False):
        if not _same_rate(rate, expected_rate):
            return False
    return True


def _same_rate(rate: float | None, expected: float | None) -> bool:
    return math.isclose(rate or 0, expected or 0, rel_tol=RATE_TOLERANCE)


def _listed(rates: _Rates) -> str:
    """Return learning rates as text, equal ones once."""
    texts = []
    for rate in dict.fromkeys(rates):
        text = "none" if rate is None else f"{rate:.6g}"
        texts.append(text)
    return ", ".join(texts) or "none"


@dataclass(frozen=True)
class _OtherNumber:
    """A hyperparameter that is not the reference's."""

    key: str
    number: float
    reference: float

    def __str__(self) -> str:
        return f"{self.number:.6g}; {self.reference:.6g} in the reference"


@dataclass
class _Places:
    """The ranks on which a hyperparameter is another one, and the parameters that have it."""

    ranks: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def _other_hyperparameters(
    cell: Cell,
    snapshots: Snapshots,
    numbers_by_rank: list[_Numbers],
    expected: list[_Numbers],
) -> Iterator[str]:
    """Yield a finding for parameters that are updated with another hyperparameter.

    Args:
        cell: The cell.
        snapshots: Those of each rank after a step.
        numbers_by_rank: The numbers of parameters on each of these ranks.
        expected: Those in the reference: of its only rank, or of none.
    """
    expected_by_name = expected[0] if expected else {}
    places_by_number: dict[_OtherNumber, _Places] = defaultdict(_Places)
    for snapshot, numbers in zip(snapshots, numbers_by_rank, strict=True):
        for name in numbers.keys() & expected_by_name.keys():
            for other in _unequal(numbers[name], expected_by_name[name]):
                places_by_number[other].ranks.add(snapshot.rank)
                places_by_number[other].names.add(name)
    for other, places in places_by_number.items():
        where = named_ranks(sorted(places.ranks), cell.world_size)
        names = listed(sorted(places.names))
        yield f"{where}: {other.key} of {names} is {other}"


def _unequal(numbers: _GroupNumbers, expected: _GroupNumbers) -> Iterator[_OtherNumber]:
    """Yield the hyperparameters that both groups have, with other numbers."""
    for key in HYPERPARAMETERS:
        number = numbers.get(key)
        reference = expected.get(key)
        if number is None or reference is None:
            continue
        if not math.isclose(number, reference, rel_tol=RATE_TOLERANCE):
            yield _OtherNumber(key, number, reference)


class _NumbersOfParameters:
    """Numbers of each parameter's group, as the steps of a run had them.

    They are read step by step, in order.

    Which group a parameter is in is known from the last step whose single gradients were recorded.
    """

    def __init__(self, run: RunTrace) -> None:
        self._names = Names(run, run.unwrapped) if run.unwrapped else str
        #: The place of each parameter's group, by rank and by the place of an optimizer's step in
        #: the trainer's step.
        self._groups: dict[tuple[int, int], dict[str, int]] = {}

    def after_step(self, snapshots: Snapshots) -> list[_Numbers]:
        """Return for each rank the numbers by the unwrapped name of the parameter."""
        return [self._of_rank(snapshot) for snapshot in snapshots]

    def _of_rank(self, snapshot: Snapshot) -> _Numbers:
        numbers: dict[str, _GroupNumbers] = {}
        for nth, step in enumerate(snapshot.steps):
            place = (snapshot.rank, nth)
            if step.gradients:
                groups: dict[str, int] = {}
                for info in step.gradients:
                    groups[self._names(info.name)] = info.group
                self._groups[place] = groups
            for name, group in self._groups.get(place, {}).items():
                if group < len(step.param_groups):
                    numbers[name] = step.param_groups[group]
        return numbers


@check(scenario=reference_runs, until=_WHOLE, order=6, not_applicable=has_reference)
def clipping(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the optimizer's gradients have the norm of the reference's, over all ranks.

    If it fails: a larger norm is not clipped, or by the norm of a shard; a smaller one is clipped
    twice, or scaled by the number of ranks. AdamW hides both for a while.
    """
    trained = trace.run("train")
    reference_run = trace.run("reference")
    tolerances = _allowed(rounding_of(cell, trained).norm_tolerance, trace, _optimizer_norm)
    largest = 0.0
    for step, tolerance in enumerate(tolerances):
        name = f"step {step + 1}"
        snapshots = trained.at("step", step)
        references = reference_run.at("reference", step)
        if not snapshots or not references:
            yield f"{name}: no reference to compare with"
            return
        expected = _optimizer_norm(references[0])
        largest = max(largest, expected)
        allowance = _Allowance(tolerance, largest)
        expectation = f"{expected:.6g} in the reference ({tolerance:.0e} allowed)"
        is_wrong = False
        for copy in _norms_of_copies(cell, trained, snapshots):
            if allowance.covers(copy.norm, expected):
                continue
            is_wrong = True
            ranks = named_ranks(copy.ranks, cell.world_size)
            if len(copy.ranks) > 1:
                ranks = f"{ranks} together"
            gradients = f"the gradients that the optimizer gets have norm {copy.norm:.6g}"
            finding = f"{gradients}; {expectation}{tied_apart(cell, trained)}"
            yield f"{name}: {ranks}: {finding}"
        if is_wrong:
            return


@dataclass(frozen=True)
class _NormOfCopy:
    """The norm of all gradients that the optimizer gets, on ranks with one copy of the model."""

    ranks: tuple[int, ...]
    norm: float


def _norms_of_copies(cell: Cell, run: RunTrace, snapshots: Snapshots) -> Iterator[_NormOfCopy]:
    """Yield the norm of the gradients of each copy of the model."""
    holders_by_rank: dict[int, tuple[int, ...]] = {}
    square_by_rank: dict[int, float] = {}
    for snapshot in snapshots:
        if snapshot.steps:
            shares = [(step.holders, step.square) for step in snapshot.steps]
            holders, square = together(shares)
            holders_by_rank[snapshot.rank] = holders
            square_by_rank[snapshot.rank] = square
    for ranks in across_stages(run, shard_groups(holders_by_rank, cell.world_size)):
        holders_of_copy: list[Snapshot] = []
        for snapshot in snapshots:
            if snapshot.rank in ranks:
                holders_of_copy.append(snapshot)
        square = sum(square_by_rank.get(rank, 0.0) for rank in ranks)
        square_of_tied = _of_later_stages(run, holders_of_copy)
        yield _NormOfCopy(ranks, math.sqrt(square - square_of_tied))


def _of_later_stages(run: RunTrace, pipeline: list[Snapshot]) -> float:
    """Return the squares of the gradients that an earlier stage has too.

    They are those of tied parameters, which are trained together.
    """
    stage_of_rank = stages_of(run)
    if not stage_of_rank or run.unwrapped is None:
        return 0.0
    names = Names(run, run.unwrapped)
    # The squares of each parameter's gradients by stage.
    squares: dict[str, dict[int, float]] = defaultdict(_zeros)
    for snapshot in pipeline:
        shares = [(step.holders, step.square) for step in snapshot.steps]
        holders, _ = together(shares)
        stage = stage_of_rank.get(snapshot.rank, 0)
        for step in snapshot.steps:
            for info in step.gradients:
                # What several of the holders have is a part of the share of each, see ``together``.
                holders_of_gradient = max(1, len(info.layout.holders))
                part = info.square * holders_of_gradient / max(1, len(holders))
                squares[names(info.name)][stage] += part
    squares_of_later: list[float] = []
    for square_by_stage in squares.values():
        earliest = min(square_by_stage)
        all_stages = sum(square_by_stage.values())
        squares_of_later.append(all_stages - square_by_stage[earliest])
    return sum(squares_of_later)


def _zeros() -> dict[int, float]:
    return defaultdict(float)


def _optimizer_norm(snapshot: Snapshot) -> float:
    """Return the norm of the gradients that the optimizer got on this rank.

    It is over all the optimizer's steps together.
    """
    squares = [step.square for step in snapshot.steps]
    return math.sqrt(sum(squares))
