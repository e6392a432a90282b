"""Does the optimizer get the reference's gradient for each single parameter?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks._factors import factors_of, named_factor
from pytest_distcompat.checks._values import Names, named_stage, rounding_of, stages_of
from pytest_distcompat.checks.parity import ROUNDING_FACTOR, has_reference, reference_runs
from pytest_distcompat.driver import Driver
from pytest_distcompat.excerpt import listed
from pytest_distcompat.trace import GradientInfo, RunTrace, Snapshot, Trace, shard_groups

#: How many steps are compared: later gradients depend on how earlier ones were rounded.
COMPARED = 3
#: Rounding is measured against this part of the norm of all gradients, if a parameter's is smaller: the gradient of the bias of
#: attention's keys is zero but for rounding. Of sound runs 1.4e-2 in bf16_upcast, 3.6e-4 in fp16_mixed, 2.3e-2 in fp8 measured.
SMALLEST = 0.01
#: Parameters whose ratios differ by less have one cause.
SAME_RATIO = 0.05

#: Unwrapped name -> norm of the gradient of all parts together; None where they are no whole.
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
    """Check that the optimizer gets a gradient of the reference's norm for each parameter, in the first three steps.

    ``clipping`` may miss a few wrong gradients.

    If it fails: all gradients off by the number of ranks or micro-batches are summed instead of averaged. A few are off
    if their module is outside the wrapped model, or its hooks do not see the call; zero or missing if a branch is
    detached.
    """
    train, reference = trace.run("train"), trace.run("reference")
    known = {info.name for info in train.unwrapped.parameters} if train.unwrapped else set()
    expected = [_norms_of_one(reference, reference.at("reference", step)) for step in range(COMPARED)]
    rounding = _deviations_of_rounding(trace.runs.get("rounded"), expected)
    tolerance = ROUNDING_FACTOR * max((rounding_of(cell, train).norm_tolerance, *rounding))
    factors, holders = factors_of(cell, train), _holders(train)
    for step in range(COMPARED):
        here = train.at("step", step)
        yield from every_rank(here, cell.world_size, f"step {step + 1}")
        if not expected[step]:
            yield f"step {step + 1}: no gradients to compare with"
            return
        found = [
            f"step {step + 1}: {named_stage(train, holders(ranks, names))}: {text}"
            for ranks, norms in _norms(train, here)
            # A live name that is none of the unwrapped model's is a finding of the check ``names``.
            if norms.keys() <= known
            for names, text in _differences(factors, norms, expected[step], tolerance)
        ]
        yield from found
        if found:
            return  # later differences follow from these


def _norms(run: RunTrace, snapshots: tuple[Snapshot, ...]) -> Iterator[tuple[tuple[int, ...], Norms]]:
    """Yield ranks that see the same gradients, put together from their shard groups, with the norms of these."""
    parts: dict[str, dict[int, GradientInfo]] = defaultdict(dict)
    norms: dict[int, dict[str, float | None]] = {snapshot.rank: {} for snapshot in snapshots}
    if (unwrapped := run.unwrapped) is not None:
        names = Names(run, unwrapped)
        for snapshot in snapshots:
            for info in (info for step in snapshot.steps for info in step.gradients):
                parts[names(info.name)][snapshot.rank] = info
    views: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for name, held in parts.items():
        for group in shard_groups({rank: info.layout.holders for rank, info in held.items()}):
            own = [held[rank] for rank in group if rank in held]
            whole = sum(info.numel for info in own) == names.sizes.get(name)
            norm = math.sqrt(sum(info.square for info in own)) if whole else None
            for rank in set(group) & norms.keys():
                norms[rank][name] = norm
                views[rank].append(group)
    # The stages of a pipeline see one training together.
    peers = {one.rank: one.model.pp_ranks for one in run.at("build") if one.model}
    ranks: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for rank in sorted(norms):
        all_views = {view for peer in peers.get(rank) or (rank,) for view in views[peer]}
        ranks[tuple(sorted(all_views)) or ((rank,),)].append(rank)
    for alike in ranks.values():
        yield tuple(alike), {name: norm for rank in reversed(alike) for name, norm in norms[rank].items()}


def _holders(run: RunTrace) -> Callable[[Sequence[int], Sequence[str]], list[int]]:
    """Return a function that chooses those of some ranks whose stage has any of some parameters; all of no pipeline."""
    names = Names(run, run.unwrapped) if run.unwrapped and stages_of(run) else None
    held = {one.rank: {names(info.name) for info in one.parameters} for one in run.at("build") if names}
    return lambda ranks, wanted: [rank for rank in ranks if not held.get(rank) or held[rank] & {*wanted}] or [*ranks]


def _norms_of_one(run: RunTrace, snapshots: tuple[Snapshot, ...]) -> Norms:
    """Return the norms of a run of one process."""
    return next((norms for _, norms in _norms(run, snapshots)), {})


def _deviations_of_rounding(rounded: RunTrace | None, expected: list[Norms]) -> Iterator[float]:
    """Yield how far rounding alone moves each gradient of a model of the driver's own, see ``parity``."""
    for step, norms in enumerate(expected if rounded else ()):
        assert rounded is not None
        found, unit = _norms_of_one(rounded, rounded.at("rounded", step)), _unit(norms)
        for name in norms.keys() & found.keys():
            here, there = found[name] or 0.0, norms[name] or 0.0
            off = abs(here - there) / max(there, unit) if unit else 0.0
            yield off if math.isfinite(off) else 0.0


def _unit(norms: Norms) -> float:
    """Return the least that rounding is measured against."""
    return SMALLEST * math.hypot(*(norm or 0.0 for norm in norms.values()))


def _differences(
    factors: Mapping[str, int], norms: Norms, expected: Norms, tolerance: float
) -> Iterator[tuple[list[str], str]]:
    """Yield a finding, with their names, for the parameters that are off by the same ratio."""
    if broken := sorted(name for name, found in norms.items() if found is None):
        yield broken, f"the gradient of {listed(broken)} cannot be put together from the ranks' parts"
        return
    unit, ratios, sound = _unit(expected), {}, 0
    for name in expected.keys() | norms.keys():
        here, there = norms.get(name) or 0.0, expected.get(name) or 0.0
        if not abs(here - there) <= tolerance * max(there, unit):
            ratios[name] = here / there if there else math.inf
        else:
            sound += there > unit
    alike: list[list[str]] = []
    for name in sorted(ratios, key=lambda name: (not math.isnan(ratios[name]), ratios[name], name)):
        if alike and math.isclose(ratios[name], ratios[alike[-1][0]], rel_tol=SAME_RATIO):
            alike[-1].append(name)
        else:
            alike.append([name])
    # What clipping does to all gradients because some are wrong shows in most of them: it is no finding of its own.
    scales = [names for names in alike if ratios[names[0]] and math.isfinite(ratios[names[0]])]
    most = max(sound, len(expected) / 2)
    scaled = [names for names in scales if len(names) > most] if len(alike) > 1 else []
    common = ratios[scaled[0][0]] if scaled else 1.0
    for names in (one for one in alike if one not in scaled):
        here, there = (one.get(names[0]) or 0.0 for one in (norms, expected))
        values = f"{names[0]!r} has norm {here:.6g}; {there:.6g} in the reference"
        everything = f"all {len(names)} parameters" if len(names) == len(expected) else listed(names)
        ratio = _ratio(factors, ratios[names[0]], common)
        yield names, f"the gradient of {everything} {ratio}: {values} ({tolerance:.0e} allowed)"


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
    known = named_factor(factors, ratio, SAME_RATIO)
    return f"{text} ({known})" if known else text
