"""Check ``gradients``: the optimizer gets the reference's gradient for each single parameter.

The check ``clipping`` compares the norm of all gradients; a few wrong ones hardly show in that.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``fsdp2-bf16_upcast-w2``, and a trace with two runs: ``train`` on the cell's ranks,
and ``reference`` in one process in float32 on the batches of all ranks. For the first three steps
the snapshot of each rank has the gradients that its optimizer got. The check yields findings, such
as ``step 1: all ranks: the gradient of all 9 parameters is 2 times the reference's (= the number of
ranks): 'lm_head.weight' has norm 2; 1 in the reference (4e-04 allowed)``.

A parameter's ratio is the norm of its gradient over that in the reference. Parameters with the same
wrong ratio are in one finding. If some gradients are wrong, clipping scales all others by one
factor; that common ratio is no finding.

``Norms`` are the norms of whole gradients by unwrapped name: ``{"lm_head.weight": 1.2, ...}``; None
for a gradient that cannot be put together from the ranks' parts. A ``View`` has the norms of one
copy of the model, and the ranks that hold it together: under DDP each rank has a view of its own.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks._factors import factors_of, named_factor
from pytest_distcompat.checks._reference import ROUNDING_FACTOR, has_reference, reference_runs
from pytest_distcompat.checks._tied import tied_apart
from pytest_distcompat.checks._whole_gradients import Norms, View, norms_of_one_process, views
from pytest_distcompat.driver import Driver
from pytest_distcompat.excerpt import listed
from pytest_distcompat.model_values import Names, named_stage, rounding_of, stages_of
from pytest_distcompat.models import known_model
from pytest_distcompat.precisions import Precision
from pytest_distcompat.trace import RunTrace, Trace

#: How many steps are compared. Later gradients depend on how earlier ones were rounded.
COMPARED = 3
#: A deviation is relative to the norm of the parameter's gradient, but at least to this part of the
#: norm of all gradients. Otherwise a gradient that is zero but for rounding would deviate by any
#: ratio, such as that of the bias of attention's keys. Sound runs deviated by 1.4e-2 in
#: bf16_upcast, 3.6e-4 in fp16_mixed, 2.3e-2 in fp8.
SMALLEST = 0.01
#: The least tolerance, below float32, for a gradient that is zero in the first step. That of LoRA's
#: matrix A is, since B is zero. Adam then gives B the signs of its gradients alone: rounding may
#: turn some, and moved the gradient of A by 8.4e-2 in bf16_upcast, with one sign out of 64.
ZERO_AT_FIRST = 0.25
#: The dtype of products -> how much more than bfloat16 it rounds. float16 has three bits more.
ROUNDED_BY = {"bfloat16": 1.0, "float16": 1 / 8}
#: Parameters whose ratios differ by less than this, relatively, are in one finding.
SAME_RATIO = 0.05


def _no_single_gradients(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    # FSDP1 then joins the parameters of a unit to one, the flat parameter.
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
    # The names of parameters in the unwrapped model, before anything wraps it.
    known: set[str] = set()
    if train.unwrapped:
        known = {info.name for info in train.unwrapped.parameters}
    expected_by_step: list[Norms] = []
    for step in range(COMPARED):
        snapshots = reference.at("reference", step)
        expected_by_step.append(norms_of_one_process(reference, snapshots))
    precision = rounding_of(cell, train)
    # The tolerance of the precision, or the largest deviation that rounding alone causes.
    rounding = [precision.norm_tolerance, _rounding_of_model(cell, precision)]
    rounding += _deviations_of_rounding(trace.runs.get("rounded"), expected_by_step)
    tolerance = _Tolerance(ROUNDING_FACTOR * max(rounding))
    if precision.compute != "float32":
        tolerance = replace(tolerance, zero_at_first=_names_of_zeros(expected_by_step[0]))
    # Numbers by which a wrong gradient is often off: ``{"the number of ranks": 2, ...}``.
    factors = factors_of(cell, train)
    for step, expected in enumerate(expected_by_step):
        step_name = f"step {step + 1}"
        snapshots = train.at("step", step)
        yield from every_rank(snapshots, cell.world_size, step_name)
        if not expected:
            yield f"{step_name}: no gradients to compare with"
            return
        findings: list[str] = []
        for view in views(train, snapshots):
            # If a name of the wrapped model maps to no unwrapped name, the check ``names`` reports
            # it, and gradients cannot be compared by name.
            if view.norms.keys() <= known:
                findings += _wrong_gradients(train, view, expected, tolerance, factors)
        for finding in findings:
            # A hint at tied parameters that are sharded as two; empty if there are none.
            cause = tied_apart(cell, train)
            yield f"{step_name}: {finding}{cause}"
        if findings:
            # Later differences follow from these.
            return


@dataclass(frozen=True)
class _Tolerance:
    """How far the norm of a gradient may be from the reference's, relative to it.

    Attributes:
        usual: Of most gradients.
        zero_at_first: The names of those that are zero in the first step, see ``ZERO_AT_FIRST``.
    """

    usual: float
    zero_at_first: frozenset[str] = frozenset()

    def of(self, name: str) -> float:
        """Return that of one parameter's gradient."""
        if name in self.zero_at_first:
            return max(self.usual, ZERO_AT_FIRST)
        return self.usual


def _names_of_zeros(norms: Norms) -> frozenset[str]:
    """Return the names of the parameters whose gradient is zero."""
    return frozenset(name for name, norm in norms.items() if norm == 0)


def _rounding_of_model(cell: Cell, precision: Precision) -> float:
    """Return how far rounding may move a gradient of a built-in model, relative to its norm.

    0.0 for a driver's own model, whose rounding the run ``rounded`` measures.
    """
    model = known_model(cell)
    if model is None:
        return 0.0
    return model.gradient_rounding * ROUNDED_BY.get(precision.compute, 0.0)


def _deviations_of_rounding(
    rounded: RunTrace | None, expected_by_step: list[Norms]
) -> Iterator[float]:
    """Yield how far rounding alone moves each gradient, relative to its norm.

    Args:
        rounded: The run that trains the reference under autocast. None for a built-in model, whose
            rounding is known.
        expected_by_step: The norms of the reference, for each step.
    """
    if rounded is None:
        return
    for step, expected in enumerate(expected_by_step):
        norms = norms_of_one_process(rounded, rounded.at("rounded", step))
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
    """Return the least norm that a deviation is relative to, see ``SMALLEST``."""
    known_norms = [norm or 0.0 for norm in norms.values()]
    return SMALLEST * math.hypot(*known_norms)


def _wrong_gradients(
    train: RunTrace,
    view: View,
    expected: Norms,
    tolerance: _Tolerance,
    factors: Mapping[str, int],
) -> Iterator[str]:
    """Yield a finding for each group of parameters whose gradients are off by the same ratio.

    Args:
        train: The run on the cell's ranks.
        view: The gradients that some of its ranks have together.
        expected: The norms of the reference.
        tolerance: How far norms may be from the reference's.
        factors: Name -> number that a wrong gradient may be multiplied or divided by:
            ``{"the number of ranks": 2}``.
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
        allowed = tolerance.of(deviation.names[0])
        yield f"{ranks}: {finding} ({allowed:.0e} allowed)"


def _ranks_that_hold(run: RunTrace, ranks: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return those of the ranks whose pipeline stage has any of the parameters.

    All of the ranks are returned if none has any of them, or if there is no pipeline.
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
        norm: The norm of the gradient of the first of them.
        reference_norm: The norm of that gradient in the reference.
        ratio: ``norm / reference_norm``: infinite if ``reference_norm`` is 0, NaN if ``norm`` is
            NaN.
    """

    names: tuple[str, ...]
    norm: float
    reference_norm: float
    ratio: float

    @property
    def is_scale(self) -> bool:
        """Tell whether the ratio may be a factor by which clipping scales gradients."""
        return self.ratio != 0 and math.isfinite(self.ratio)


@dataclass(frozen=True)
class _Comparison:
    """How the gradients deviate from the reference's.

    Attributes:
        deviations: The deviations that are findings, without a common one.
        common_ratio: The ratio that most gradients have in common, because clipping scaled them,
            such as 0.7; 1.0 if most have none.
    """

    deviations: tuple[_Deviation, ...]
    common_ratio: float


def _compare(norms: Norms, expected: Norms, tolerance: _Tolerance) -> _Comparison:
    """Return how the norms deviate from the reference's."""
    smallest = _smallest_norm(expected)
    # The ratio of each parameter whose norm is wrong.
    ratios: dict[str, float] = {}
    # The number of gradients that are right, and large enough to show a common factor.
    sound = 0
    for name in expected.keys() | norms.keys():
        norm = norms.get(name) or 0.0
        reference_norm = expected.get(name) or 0.0
        allowed = tolerance.of(name) * max(reference_norm, smallest)
        # A norm that is NaN is not close.
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
        deviation = _Deviation(tuple(names), norm, reference_norm, ratios[first])
        deviations.append(deviation)
    # A ratio is common if more gradients have it than are sound, and more than half of all.
    most = max(sound, len(expected) / 2)
    return _without_common_ratio(deviations, most)


def _without_common_ratio(deviations: list[_Deviation], most: float) -> _Comparison:
    """Return the deviations without the one that most gradients have in common.

    If some gradients are too large, clipping makes all others smaller by one factor. That factor is
    no finding of its own, unless it is the only deviation.

    Args:
        deviations: All deviations.
        most: A deviation is common if more than this number of gradients have it.
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
        # NaN is close to nothing, so each name with NaN is a group of its own.
        if math.isclose(ratios[name], ratio_of_group, rel_tol=SAME_RATIO):
            groups[-1].append(name)
        else:
            groups.append([name])
            ratio_of_group = ratios[name]
    return groups


def _worded(
    deviation: _Deviation, common_ratio: float, parameters: int, factors: Mapping[str, int]
) -> str:
    """Return the finding about a deviation.

    Args:
        deviation: The deviation.
        common_ratio: The ratio of most other gradients.
        parameters: The number of parameters of the model.
        factors: Name -> number, see ``_wrong_gradients``.
    """
    names = listed(deviation.names)
    if len(deviation.names) == parameters:
        names = f"all {parameters} parameters"
    ratio = _ratio(factors, deviation.ratio, common_ratio)
    first = deviation.names[0]
    expected = f"{deviation.reference_norm:.6g} in the reference"
    norms = f"{first!r} has norm {deviation.norm:.6g}; {expected}"
    return f"the gradient of {names} {ratio}: {norms}"


def _ratio(factors: Mapping[str, int], ratio: float, common: float) -> str:
    """Return the ratio in words: ``is 2 times the reference's (= the number of ranks)``."""
    if not ratio:
        return "is zero or missing"
    if not math.isfinite(ratio):
        return "is not finite, or has none in the reference"
    number = f"{ratio:.4g}"
    # "1 times" would read as if it were right.
    if number == "1":
        number = f"{ratio:.6g}"
    text = f"is {number} times the reference's"
    if common != 1.0:
        ratio /= common
        text += f", {ratio:.4g} times as much as the others"
    factor = named_factor(factors, ratio, SAME_RATIO)
    if factor:
        text += f" ({factor})"
    return text
