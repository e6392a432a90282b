"""Does the optimizer get the reference's gradient for each single parameter?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank
from pytest_distcompat.checks._factors import factors_of, named_factor
from pytest_distcompat.checks._reference import ROUNDING_FACTOR, has_reference, reference_runs
from pytest_distcompat.checks._tied import tied_apart
from pytest_distcompat.driver import Driver
from pytest_distcompat.excerpt import listed
from pytest_distcompat.model_values import (
    Names,
    Ranks,
    named_stage,
    pipelines_of,
    rounding_of,
    stages_of,
)
from pytest_distcompat.trace import GradientInfo, RunTrace, Trace, shard_groups

#: How many steps are compared: later gradients depend on how earlier ones were rounded.
COMPARED = 3
#: Rounding is measured against this part of the norm of all gradients, if a parameter's is smaller:
#: the gradient of the bias of attention's keys is zero but for rounding. Of sound runs 1.4e-2 in
#: bf16_upcast, 3.6e-4 in fp16_mixed, 2.3e-2 in fp8 measured.
SMALLEST = 0.01
#: Parameters whose ratios differ by less have one cause.
SAME_RATIO = 0.05

#: Unwrapped name -> norm of the gradient of all parts together; None where the parts are not the
#: whole tensor.
Norms = Mapping[str, float | None]


def _no_single_gradients(cell: Cell, driver: type[Driver]) -> str | None:
    if not cell.option("use_orig_params"):
        return "a flat parameter has one gradient for all the parameters in it"
    return has_reference(cell, driver)


@check(
    scenario=reference_runs,
    until=(("train", "step", COMPARED - 1), ("reference", "reference", COMPARED - 1)),
    order=6,
    not_applicable=_no_single_gradients,
)
def gradients(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the optimizer gets a gradient of the reference's norm for each parameter.

    It does in the first three steps. ``clipping`` may miss a few wrong gradients.

    If it fails: all gradients off by the number of ranks or micro-batches are summed instead of
    averaged. A few are off if their module is outside the wrapped model, or its hooks do not see
    the call; zero or missing if a branch is detached.
    """
    train = trace.run("train")
    reference = trace.run("reference")
    known: set[str] = set()
    if train.unwrapped:
        known = {info.name for info in train.unwrapped.parameters}
    expected_by_step: list[Norms] = []
    for step in range(COMPARED):
        snapshots = reference.at("reference", step)
        expected_by_step.append(_norms_of_one_process(reference, snapshots))
    rounding = [rounding_of(cell, train).norm_tolerance]
    rounding += _deviations_of_rounding(trace.runs.get("rounded"), expected_by_step)
    tolerance = ROUNDING_FACTOR * max(rounding)
    factors = factors_of(cell, train)
    for step, expected in enumerate(expected_by_step):
        step_name = f"step {step + 1}"
        snapshots = train.at("step", step)
        yield from every_rank(snapshots, cell.world_size, step_name)
        if not expected:
            yield f"{step_name}: no gradients to compare with"
            return
        findings: list[str] = []
        for view in _views(train, snapshots):
            # A live name that is none of the unwrapped model's is a finding of the check ``names``.
            if view.norms.keys() <= known:
                findings += _wrong_gradients(train, view, expected, tolerance, factors)
        for finding in findings:
            cause = tied_apart(cell, train)
            yield f"{step_name}: {finding}{cause}"
        if findings:
            return  # later differences follow from these


@dataclass(frozen=True)
class _View:
    """Ranks that see the same gradients; a rank of a pipeline sees those of all its stages.

    Attributes:
        ranks: The ranks.
        norms: The norms of the gradients.
    """

    ranks: Ranks
    norms: Norms


def _views(run: RunTrace, snapshots: Snapshots) -> Iterator[_View]:
    """Yield what the ranks see of the gradients, put together from the parts of shard groups."""
    norms_by_rank: dict[int, dict[str, float | None]] = {}
    for snapshot in snapshots:
        norms_by_rank[snapshot.rank] = {}
    groups_by_rank: dict[int, set[Ranks]] = defaultdict(set)
    for gradient in _whole_gradients(run, snapshots):
        for rank in gradient.ranks:
            if rank in norms_by_rank:
                norms_by_rank[rank][gradient.name] = gradient.norm
                groups_by_rank[rank].add(gradient.ranks)
    for ranks in _ranks_with_same_groups(run, groups_by_rank, sorted(norms_by_rank)):
        norms: dict[str, float | None] = {}
        # Where ranks disagree, the norm of the lowest one stays.
        for rank in reversed(ranks):
            norms.update(norms_by_rank[rank])
        yield _View(ranks, norms)


def _ranks_with_same_groups(
    run: RunTrace, groups_by_rank: Mapping[int, set[Ranks]], ranks: Sequence[int]
) -> list[Ranks]:
    """Return the ranks whose gradients are put together from the same shard groups.

    Args:
        run: The run.
        groups_by_rank: The shard groups that each rank has parts in.
        ranks: The ranks, in ascending order.
    """
    # The stages of a pipeline see one training together.
    pipelines = pipelines_of(run)
    ranks_by_groups: dict[frozenset[Ranks], list[int]] = defaultdict(list)
    for rank in ranks:
        groups: set[Ranks] = set()
        for peer in pipelines.get(rank) or (rank,):
            groups.update(groups_by_rank.get(peer, ()))
        if not groups:
            groups.add((rank,))
        ranks_by_groups[frozenset(groups)].append(rank)
    return [tuple(members) for members in ranks_by_groups.values()]


@dataclass(frozen=True)
class _WholeGradient:
    """The gradient of a parameter on the ranks of one shard group.

    Attributes:
        name: The parameter's unwrapped name.
        ranks: The ranks.
        norm: Its norm; None if the parts of these ranks are not the whole tensor.
    """

    name: str
    ranks: Ranks
    norm: float | None


def _whole_gradients(run: RunTrace, snapshots: Snapshots) -> Iterator[_WholeGradient]:
    """Yield the gradient of each parameter, by its unwrapped name, as each shard group has it."""
    if run.unwrapped is None:
        return
    names = Names(run, run.unwrapped)
    parts_by_name: dict[str, dict[int, GradientInfo]] = defaultdict(dict)
    for snapshot in snapshots:
        for step in snapshot.steps:
            for info in step.gradients:
                parts_by_name[names(info.name)][snapshot.rank] = info
    for name, part_of_rank in parts_by_name.items():
        holders_by_rank = {rank: info.layout.holders for rank, info in part_of_rank.items()}
        for group in shard_groups(holders_by_rank):
            parts: list[GradientInfo] = []
            for rank in group:
                if rank in part_of_rank:
                    parts.append(part_of_rank[rank])
            norm = _whole_norm(parts, names.sizes.get(name))
            yield _WholeGradient(name, group, norm)


def _whole_norm(parts: list[GradientInfo], numel: int | None) -> float | None:
    """Return the norm of parts together; None if they do not have so many elements."""
    if sum(info.numel for info in parts) != numel:
        return None
    return math.sqrt(sum(info.square for info in parts))


def _norms_of_one_process(run: RunTrace, snapshots: Snapshots) -> Norms:
    """Return the norms of a run of one process; none if it recorded no snapshot."""
    for view in _views(run, snapshots):
        return view.norms
    return {}


def _deviations_of_rounding(
    rounded: RunTrace | None, expected_by_step: list[Norms]
) -> Iterator[float]:
    """Yield how far rounding alone moves each gradient, relative to its norm; see ``parity``.

    That was run only for a model of the driver's own.
    """
    if rounded is None:
        return
    for step, expected in enumerate(expected_by_step):
        norms = _norms_of_one_process(rounded, rounded.at("rounded", step))
        smallest = _smallest_norm(expected)
        if not smallest:
            continue
        for name in expected.keys() & norms.keys():
            norm = norms[name] or 0.0
            reference_norm = expected[name] or 0.0
            deviation = abs(norm - reference_norm) / max(reference_norm, smallest)
            if math.isfinite(deviation):
                yield deviation


def _smallest_norm(norms: Norms) -> float:
    """Return the least norm that rounding is measured against."""
    known_norms = [norm or 0.0 for norm in norms.values()]
    return SMALLEST * math.hypot(*known_norms)


def _wrong_gradients(
    train: RunTrace, view: _View, expected: Norms, tolerance: float, factors: Mapping[str, int]
) -> Iterator[str]:
    """Yield a finding for each group of parameters whose gradients are off by the same ratio.

    Args:
        train: The training.
        view: The gradients that some of its ranks see.
        expected: Those of the reference.
        tolerance: How far norms may be from the reference's, relative to them.
        factors: By name the numbers that a gradient may be too large or too small by.
    """
    incomplete: list[str] = []
    for name in sorted(view.norms):
        if view.norms[name] is None:
            incomplete.append(name)
    if incomplete:
        ranks = named_stage(train, _ranks_that_hold(train, view.ranks, incomplete))
        gradient = f"the gradient of {listed(incomplete)}"
        yield f"{ranks}: {gradient} cannot be put together from the ranks' parts"
        return
    comparison = _compare(view.norms, expected, tolerance)
    for deviation in comparison.deviations:
        ranks = named_stage(train, _ranks_that_hold(train, view.ranks, deviation.names))
        finding = _worded(deviation, comparison.common_ratio, len(expected), factors)
        yield f"{ranks}: {finding} ({tolerance:.0e} allowed)"


def _ranks_that_hold(run: RunTrace, ranks: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return those of some ranks whose stage of a pipeline has any of the parameters.

    It returns all of these ranks if no stage has one, or if there is no pipeline.
    """
    if run.unwrapped is None or not stages_of(run):
        return list(ranks)
    unwrapped_name = Names(run, run.unwrapped)
    names_of_rank: dict[int, set[str]] = {}
    for snapshot in run.at("build"):
        names_of_rank[snapshot.rank] = {unwrapped_name(info.name) for info in snapshot.parameters}
    holders: list[int] = []
    for rank in ranks:
        held_names = names_of_rank.get(rank)
        if not held_names or held_names.intersection(names):
            holders.append(rank)
    return holders or list(ranks)


@dataclass(frozen=True)
class _Deviation:
    """Parameters whose gradients have about the same wrong ratio to the reference's.

    Attributes:
        names: Their unwrapped names, by ascending ratio.
        norm: The norm of the first one's gradient.
        reference_norm: That in the reference.
        ratio: The ratio of the two; infinite if the reference has none, NaN if the norm is.
    """

    names: tuple[str, ...]
    norm: float
    reference_norm: float
    ratio: float

    @property
    def is_scale(self) -> bool:
        """Tell whether the ratio is a factor that another may be multiplied by."""
        return self.ratio != 0 and math.isfinite(self.ratio)


@dataclass(frozen=True)
class _Comparison:
    """In what gradients deviate from the reference's.

    Attributes:
        deviations: The deviations, without the common one.
        common_ratio: The ratio that most gradients have in common: 1.0 if they have the reference's
            norm.
    """

    deviations: tuple[_Deviation, ...]
    common_ratio: float


def _compare(norms: Norms, expected: Norms, tolerance: float) -> _Comparison:
    """Return in what the norms deviate from the reference's."""
    smallest = _smallest_norm(expected)
    ratios: dict[str, float] = {}
    sound = 0
    for name in expected.keys() | norms.keys():
        norm = norms.get(name) or 0.0
        reference_norm = expected.get(name) or 0.0
        allowed = tolerance * max(reference_norm, smallest)
        # False for NaN.
        is_close = abs(norm - reference_norm) <= allowed
        if not is_close:
            ratios[name] = math.inf
            if reference_norm:
                ratios[name] = norm / reference_norm
        elif reference_norm > smallest:
            sound += 1
    deviations: list[_Deviation] = []
    for names in _names_by_ratio(ratios):
        first = names[0]
        norm = norms.get(first) or 0.0
        reference_norm = expected.get(first) or 0.0
        deviations.append(_Deviation(tuple(names), norm, reference_norm, ratios[first]))
    return _without_common_ratio(deviations, max(sound, len(expected) / 2))


def _without_common_ratio(deviations: list[_Deviation], most: float) -> _Comparison:
    """Return the deviations without that which most gradients have in common.

    What clipping does to all gradients because some are wrong shows in most of them: it is no
    finding of its own, unless it is the only deviation.

    Args:
        deviations: The deviations.
        most: More than so many gradients have the common one.
    """
    common: list[_Deviation] = []
    others: list[_Deviation] = []
    for deviation in deviations:
        if deviation.is_scale and len(deviation.names) > most:
            common.append(deviation)
        else:
            others.append(deviation)
    if not common or len(deviations) == 1:
        return _Comparison(tuple(deviations), 1.0)
    return _Comparison(tuple(others), common[0].ratio)


def _names_by_ratio(ratios: Mapping[str, float]) -> list[list[str]]:
    """Return the names of parameters in groups of about the same ratio.

    Groups whose ratio is NaN come first, the others by ascending ratio.
    """

    def by_ratio(name: str) -> tuple[bool, float, str]:
        ratio = ratios[name]
        return (not math.isnan(ratio), ratio, name)

    groups: list[list[str]] = []
    ratio_of_group = math.nan
    for name in sorted(ratios, key=by_ratio):
        # False for NaN: then each name is a group.
        if math.isclose(ratios[name], ratio_of_group, rel_tol=SAME_RATIO):
            groups[-1].append(name)
        else:
            groups.append([name])
            ratio_of_group = ratios[name]
    return groups


def _worded(
    deviation: _Deviation, common_ratio: float, parameters: int, factors: Mapping[str, int]
) -> str:
    """Return the finding about a deviation, of a model with so many parameters."""
    names = listed(deviation.names)
    if len(deviation.names) == parameters:
        names = f"all {parameters} parameters"
    ratio = _ratio(factors, deviation.ratio, common_ratio)
    first = deviation.names[0]
    expected = f"{deviation.reference_norm:.6g} in the reference"
    norms = f"{first!r} has norm {deviation.norm:.6g}; {expected}"
    return f"the gradient of {names} {ratio}: {norms}"


def _ratio(factors: Mapping[str, int], ratio: float, common: float) -> str:
    """Return the ratio in words, and what number it is if it is a known one."""
    if not ratio:
        return "is zero or missing"
    if not math.isfinite(ratio):
        return "is not finite, or has none in the reference"
    text = f"is {ratio:.4g} times the reference's"
    if common != 1.0:
        ratio /= common
        text += f", {ratio:.4g} times as much as the others"
    factor = named_factor(factors, ratio, SAME_RATIO)
    if factor:
        text += f" ({factor})"
    return text
