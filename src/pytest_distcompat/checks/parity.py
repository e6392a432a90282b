"""Does the cell train the same model as one process in float32 at the same learning rate?"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, finite_losses, named_ranks
from pytest_distcompat.checks._factors import factors_of, named_factor
from pytest_distcompat.checks._values import Names, across_stages, in_tf32, rounding_of, stages_of
from pytest_distcompat.driver import Driver
from pytest_distcompat.excerpt import listed
from pytest_distcompat.models import TinyModel, model_of
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.scenario import PARITY, ROUNDED_PARITY, STEPS, Scenario
from pytest_distcompat.settings.rules import contradiction
from pytest_distcompat.trace import RunTrace, Snapshot, Trace, shard_groups, together

#: A trainer may deviate by so many times what rounding does to the reference, or what the table allows: it rounds in other
#: places too. ``benchmarks/rounding.py`` measures it on four small models.
ROUNDING_FACTOR = 2
#: Relative, for learning rates, which are products of a few factors.
RATE_TOLERANCE = 1e-9
#: Relative: a gradient norm from before clipping that differs less from the one after it was not clipped.
UNCLIPPED = 1e-3
#: What single parameters are compared on; optimizers of other classes may have further numbers.
HYPERPARAMETERS = ("lr", "weight_decay", "betas.0", "betas.1", "eps", "momentum")
#: Unwrapped name -> the numbers of the parameter's group.
_Numbers = Mapping[str, Mapping[str, float]]
_WHOLE = (("train", "step", STEPS - 1), ("reference", "reference", STEPS - 1))


def has_reference(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why there is no reference to compare with; None if there is one."""
    if "model" in driver.options and model_of(cell).random:
        return "one process does not draw the random numbers of several ranks"
    if driver.can("reference"):
        return None
    missing = " and ".join(f"{name}()" for name in ("loss", "make_optimizer") if not driver.can(name))
    return f"the driver has no reference() to compare with; write {missing}, from which it is derived, or reference() itself"


def reference_runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs; for a model of the driver's own one more measures rounding, which is known for built-in ones.

    Of two settings that contradict each other either may win, so that there is a reference for each.
    """
    own = "model" not in driver.options and PRECISIONS.get(cell.precision).compute != "float32"
    return (ROUNDED_PARITY if own else PARITY).following(*contradiction(cell.set))


@check(scenario=reference_runs, until=_WHOLE, order=5, not_applicable=has_reference)
def parity(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that training equals that of one process in float32 on the same batches, over 20 steps.

    Loss and reported gradient norm agree within the precision's tolerance, learning rate, weight decay and the like of
    each parameter exactly. The ranks' losses are a mean if their average is the reference's; if instead their sum is, each
    rank reports its part of a sum, and gradients equal to the reference's in every step must prove it. Ranks, steps and
    micro-batches have different numbers of tokens, and the last step of an epoch has fewer micro-batches than the others.

    If it fails: a loss that is off from the first step on is computed differently, such as a mean of unequal
    micro-batches' means; the finding then says what counts alike. One that is off later comes from the optimizer:
    bfloat16 masters, gradients summed instead of averaged, another schedule.
    """
    losses, norms = tolerances(cell, trace)
    trained, reference = trace.run("train"), trace.run("reference")
    numbers = _NumbersOfParameters(trained), _NumbersOfParameters(reference)
    factors = factors_of(cell, trained)
    parts = _parts_of_a_sum(cell, trace, losses[0], norms)
    largest_loss = largest_norm = 0.0
    for step in range(STEPS):
        here, there = trained.at("step", step), reference.at("reference", step)
        yield from every_rank(here, cell.world_size, f"step {step + 1}")
        if not here or not there:
            yield f"step {step + 1}: no reference to compare with"
            return
        here = tuple(_times_ranks(one, cell) for one in here) if parts else here
        largest_loss = max(largest_loss, abs(there[0].loss or 0.0))
        largest_norm = max(largest_norm, there[0].grad_norm or 0.0)
        found = [
            one + _same_rows(cell) for one in _loss(here, there[0], losses[step], largest_loss, cell, factors=factors)
        ]
        found += _norm(here, there[0], norms[step], largest_norm, factors)
        found = [one + in_tf32(trained) for one in found]
        groups = [of(snapshots) for of, snapshots in zip(numbers, (here, there), strict=True)]
        found += [*_rates(here, there[0])] or _hyperparameters(cell, here, *groups)
        yield from (f"step {step + 1}: {text}" for text in found)
        if found:
            return  # later deviations follow from this one


def _parts_of_a_sum(cell: Cell, trace: Trace, tolerance: float, norms: Sequence[float]) -> bool:
    """Tell whether the losses of data-parallel ranks add up to the reference's, and training is the reference's all the same.

    Such a trainer divides by the tokens of all ranks and sums gradients over ranks. One that divides so and averages
    gradients has the same losses, and gradients that are too small.
    """
    trained, reference = trace.run("train"), trace.run("reference")
    here, there = trained.at("step", 0), reference.at("reference", 0)
    losses = [one.loss for one in here if one.loss is not None]
    if cell.dp_size == 1 or not losses or len(losses) != len(here) or not there or there[0].loss is None:
        return False
    total = cell.dp_size * sum(losses) / len(losses)
    adds_up = math.isclose(total, there[0].loss, rel_tol=tolerance)
    return adds_up and _shows_gradients(trace, norms) and not any(clipping(cell, trace))


def _shows_gradients(trace: Trace, tolerances: Sequence[float]) -> bool:
    """Tell whether gradients are known to be the reference's before clipping: after it, wrong ones may have the same norm."""
    for step, tolerance in enumerate(tolerances):
        here, there = trace.run("train").at("step", step), trace.run("reference").at("reference", step)
        expected = there[0].grad_norm if there else None
        if expected is None:
            return False
        reported = [one.grad_norm for one in here if one.grad_norm is not None]
        if any(not math.isclose(norm, expected, rel_tol=tolerance) for norm in reported):
            return False
        unclipped = math.isclose(math.sqrt(_square(there[0])), expected, rel_tol=UNCLIPPED)
        if len(reported) < len(here) and not unclipped:
            return False
    return True


def _times_ranks(snapshot: Snapshot, cell: Cell) -> Snapshot:
    """Return the snapshot with the loss that the rank would report if losses were means over ranks."""
    return dataclasses.replace(snapshot, loss=None if snapshot.loss is None else snapshot.loss * cell.dp_size)


def tolerances(cell: Cell, trace: Trace) -> tuple[list[float], list[float]]:
    """Return for each step how far loss and gradient norm may be from the reference, relative to it."""
    precision = rounding_of(cell, trace.run())
    spread = _spread(model_of(cell), precision, trace.run())
    losses = _allowed(precision.loss_tolerance * spread, trace, lambda snapshot: snapshot.loss)
    norms = precision.norm_tolerance * model_of(cell).norm_spread
    return losses, _allowed(norms, trace, lambda snapshot: snapshot.grad_norm)


def _spread(model: TinyModel, precision: Precision, run: RunTrace) -> float:
    """Return the model's factor on the tolerance of losses, which is larger where a GPU adds up products of bfloat16."""
    if precision.compute == "float32":
        return 1.0
    larger = run.on_gpu and precision.compute == "bfloat16"
    return max(model.spread, model.gpu_spread) if larger else model.spread


def _allowed(table: float, trace: Trace, number: Callable[[Snapshot], float | None]) -> list[float]:
    """Return for each step how far the number may be from the reference, relative to it: by the table, or as measured."""
    # Measured up to that step and a little beyond, for the trainer's rounding may show earlier; later steps do not count.
    rounded, reference = trace.runs.get("rounded"), trace.run("reference")
    if rounded is None:
        return [table] * STEPS
    off = []
    for step in range(STEPS):
        snapshots = (*reference.at("reference", step), *rounded.at("rounded", step))
        there, here = (number(snapshot) for snapshot in snapshots) if len(snapshots) == 2 else (None, None)
        found = abs(there - here) / abs(there) if there and here is not None else 0.0
        off.append(found if math.isfinite(found) else 0.0)
    return [ROUNDING_FACTOR * max(table, *off[: 2 * step + 3]) for step in range(STEPS)]


def _loss(
    here: tuple[Snapshot, ...],
    there: Snapshot,
    tolerance: float,
    largest: float,
    cell: Cell,
    *,
    factors: Mapping[str, int],
) -> Iterator[str]:
    losses = [snapshot.loss for snapshot in here if snapshot.loss is not None]
    if len(losses) != len(here) or there.loss is None:
        yield "no loss to compare; expected step() to return it on every rank, and reference()"
        return
    if infinite := [*finite_losses(here, "this step")]:
        yield from infinite
        return
    loss = sum(losses) / len(losses)
    if not _close(loss, there.loss, tolerance, largest):
        expected = _expected(loss, there.loss, tolerance, largest)
        cause = _average(loss, there, tolerance, cell) or _times(loss, there.loss, factors, tolerance)
        yield f"the loss is {loss:.6g}; {expected}{cause}"


def _average(loss: float, there: Snapshot, tolerance: float, cell: Cell) -> str:
    """Return what counts alike in the loss and in the reference's, if the loss is a mean with other weights; else nothing.

    The mean may be multiplied by the number of data parallel ranks, as a loss is that is meant to be a sum of their shares, or by
    that of micro-batches.
    """

    def alike(one: float) -> list[str]:
        return [name for name, mean in there.averages.items() if math.isclose(one, mean, rel_tol=tolerance)]

    numbers = {cell.dp_size: ["ranks"]}
    numbers.setdefault(int(cell.option("grad_accum")), []).append("micro-batches a step")
    once, expected = alike(loss), alike(there.loss or 0.0)
    times = [
        f"{found[0]} counts alike, times {number}, the number of {' or of '.join(names)}"
        for number, names in numbers.items()
        if (found := alike(loss / number))
    ]
    if not expected or not (once or times) or set(once) & set(expected):
        return ""
    return f": here {f'{once[0]} counts alike' if once else times[0]}, there {expected[0]}"


def _times(here: float, there: float, factors: Mapping[str, int], tolerance: float) -> str:
    """Return which plain factor a number is off by, as ``gradients`` says it; an empty text if it is off by none."""
    ratio = here / there if there else math.inf
    factor = named_factor(factors, ratio, tolerance)
    return f": {ratio:.4g} times the reference's ({factor})" if factor else ""


def _same_rows(cell: Cell) -> str:
    """Return what no check can compare under context parallelism, whose ranks see only parts of rows; else nothing."""
    ranks = ", ".join(map(str, cell.cp_peers(0)))
    return f"; with cp {cell.cp} ranks {ranks} must be fed parts of the same rows" if cell.cp > 1 else ""


def _norm(
    here: tuple[Snapshot, ...], there: Snapshot, tolerance: float, largest: float, factors: Mapping[str, int]
) -> Iterator[str]:
    for snapshot in here:
        norm = snapshot.grad_norm
        if norm is not None and there.grad_norm is not None and not _close(norm, there.grad_norm, tolerance, largest):
            expected = _expected(norm, there.grad_norm, tolerance, largest)
            cause = _times(norm, there.grad_norm, factors, tolerance)
            yield f"rank {snapshot.rank}: the gradient norm is {norm:.6g}; {expected}{cause}"


def _close(here: float, there: float, tolerance: float, largest: float) -> bool:
    """Tell whether both are finite and close, relative to themselves or, if the reference is 0, to the largest yet."""
    finite = math.isfinite(here) and math.isfinite(there)
    return finite and math.isclose(here, there, rel_tol=tolerance, abs_tol=0.0 if there else tolerance * largest)


def _expected(here: float, there: float, tolerance: float, largest: float) -> str:
    size = abs(there) or largest
    off = abs(here - there) / size if size else math.inf
    return f"{there:.6g} in the reference ({off:.1e} off, {tolerance:.1e} allowed)"


def _rates(here: tuple[Snapshot, ...], there: Snapshot) -> Iterator[str]:
    expected = [group.get("lr") for group in there.param_groups]
    for snapshot in here:
        found = [group.get("lr") for group in snapshot.param_groups]
        # A trainer may keep parameters in more groups than it was given.
        alike = len(set(expected)) == 1 and len(set(found)) == 1
        pairs = [(found[0], expected[0])] if alike else list(zip(found, expected, strict=False))
        if any(not math.isclose(one or 0, other or 0, rel_tol=RATE_TOLERANCE) for one, other in pairs):
            yield f"rank {snapshot.rank}: the learning rate is {_list(found)}; {_list(expected)} in the reference"


def _hyperparameters(
    cell: Cell, here: tuple[Snapshot, ...], found: list[_Numbers], reference: list[_Numbers]
) -> Iterator[str]:
    """Yield what parameters are updated with, unlike in the reference."""
    (expected,) = reference or [{}]
    wrong: dict[tuple[str, float, float], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for snapshot, numbers in zip(here, found, strict=True):
        for name in numbers.keys() & expected.keys():
            pairs = ((key, numbers[name].get(key), expected[name].get(key)) for key in HYPERPARAMETERS)
            for key, one, other in pairs:
                if one is not None and other is not None and not math.isclose(one, other, rel_tol=RATE_TOLERANCE):
                    wrong[key, one, other][name].append(snapshot.rank)
    for (key, one, other), names in wrong.items():
        ranks = named_ranks(sorted({rank for some in names.values() for rank in some}), cell.world_size)
        yield f"{ranks}: {key} of {listed(sorted(names))} is {one:.6g}; {other:.6g} in the reference"


class _NumbersOfParameters:
    """Numbers of each parameter's group, as the steps of a run had them; call it with the snapshots of each step in order.

    Which group a parameter is in is known from the last step whose single gradients were recorded.
    """

    def __init__(self, run: RunTrace) -> None:
        self._names = Names(run, run.unwrapped) if run.unwrapped else str
        self._group_of: dict[tuple[int, int], dict[str, int]] = {}

    def __call__(self, snapshots: tuple[Snapshot, ...]) -> list[_Numbers]:
        """Return for each rank the numbers by the unwrapped name of the parameter."""
        return [dict(self._of_rank(snapshot)) for snapshot in snapshots]

    def _of_rank(self, snapshot: Snapshot) -> Iterator[tuple[str, Mapping[str, float]]]:
        for nth, step in enumerate(snapshot.steps):
            place = snapshot.rank, nth
            if step.gradients:
                self._group_of[place] = {self._names(info.name): info.group for info in step.gradients}
            for name, group in self._group_of.get(place, {}).items():
                if group < len(step.param_groups):
                    yield name, step.param_groups[group]


def _list(rates: list[float | None]) -> str:
    return ", ".join(f"{rate:.6g}" if rate is not None else "none" for rate in dict.fromkeys(rates)) or "none"


@check(scenario=reference_runs, until=_WHOLE, order=6, not_applicable=has_reference)
def clipping(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the gradients that the optimizer gets have the norm of the reference's, over all ranks together.

    If it fails: a larger norm is not clipped, or by the norm of a shard; a smaller one is clipped twice, or scaled by
    the number of ranks. AdamW hides both for a while.
    """
    table = rounding_of(cell, trace.run()).norm_tolerance
    tolerances = _allowed(table, trace, lambda snapshot: math.sqrt(_square(snapshot)))
    largest = 0.0
    for step in range(STEPS):
        here, there = trace.run("train").at("step", step), trace.run("reference").at("reference", step)
        if not here or not there:
            yield f"step {step + 1}: no reference to compare with"
            return
        expected = math.sqrt(_square(there[0]))
        shares = {one.rank: together((step.holders, step.square) for step in one.steps) for one in here if one.steps}
        shards = shard_groups({rank: holders for rank, (holders, _) in shares.items()}, cell.world_size)
        largest, wrong = max(largest, expected), False
        for ranks in across_stages(trace.run("train"), shards):
            later = _of_later_stages(trace.run("train"), [one for one in here if one.rank in ranks])
            norm = math.sqrt(sum(shares[rank][1] for rank in ranks if rank in shares) - later)
            if not _close(norm, expected, tolerances[step], largest):
                wrong = True
                holders = f"{named_ranks(ranks, cell.world_size)}{' together' if len(ranks) > 1 else ''}"
                finding = f"the gradients that the optimizer gets have norm {norm:.6g}; {expected:.6g} in the reference"
                yield f"step {step + 1}: {holders}: {finding} ({tolerances[step]:.0e} allowed)"
        if wrong:
            return


def _of_later_stages(run: RunTrace, pipeline: list[Snapshot]) -> float:
    """Return the squares of the gradients that an earlier stage has too: those of tied parameters, trained together."""
    stages = stages_of(run)
    if not stages or run.unwrapped is None:
        return 0.0
    names, squares = Names(run, run.unwrapped), defaultdict[str, dict[int, float]](dict)
    for one in pipeline:
        holders, _ = together((step.holders, step.square) for step in one.steps)
        for info in (info for step in one.steps for info in step.gradients):
            of_stage, stage = squares[names(info.name)], stages.get(one.rank, 0)
            # What several of the holders have is a part of the share of each, see ``together``.
            part = info.square * max(1, len(info.layout.holders)) / max(1, len(holders))
            of_stage[stage] = of_stage.get(stage, 0.0) + part
    return sum(sum(of_stage.values()) - of_stage[min(of_stage)] for of_stage in squares.values())


def _square(snapshot: Snapshot) -> float:
    return sum(step.square for step in snapshot.steps)
