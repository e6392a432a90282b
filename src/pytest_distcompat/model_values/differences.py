"""Findings about what a load did not bring back: values, dtypes, numbers of the optimizer.

Checks that resume, reshard or restart a training call this module with what the ranks held before a
save and after a load. A *finding* is a sentence for the report; no finding means that all is equal.
Example: ``exp_avg 'lm_head.weight': other values after the load``. Tensors that differ in the same
way are in one finding.

What ranks hold is given as ``Values``, whose ``digests`` are kind -> name in the unwrapped model
(before anything wrapped it) -> digests. A *kind* is ``parameter``, ``buffer``, ``master`` (the
float32 copy of a parameter that the optimizer updates), or a key of the optimizer's state such as
``exp_avg``. A *digest* is a hash of a whole tensor as text; a tensor has several if its replicas
differ from rank to rank. ``Values.of("exp_avg")`` is ``{"lm_head.weight": ("32:1f2e",), ...}``.
``Values.wrong`` has findings about tensors whose parts on the ranks are no whole tensor together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.model_values.parameters import without_gradient
from pytest_distcompat.model_values.whole import Digests, Kind, Names, Values, values
from pytest_distcompat.trace import RunTrace, Snapshot
from pytest_distcompat.wording import and_others


def differences(saved: Values, loaded: Values, when: str, *, states: bool = True) -> Iterator[str]:
    """Yield a finding for everything that is not equal bit by bit before and after a load.

    Digests are compared, one for each whole tensor, so the two may be of other numbers of ranks.

    Args:
        saved: The values before.
        loaded: The values after.
        when: The words for the time of the second: "after the load".
        states: Whether to compare optimizer states and master weights too.
    """
    for text in loaded.wrong:
        yield f"{text} {when}"
    for text in saved.wrong:
        yield f"{text} before"
    kinds: list[Kind] = []
    state_kinds: list[Kind] = []
    for kind in saved.digests:
        if kind in {"parameter", "buffer"}:
            kinds.append(kind)
        elif states:
            kinds.append(kind)
            if kind != "master":
                state_kinds.append(kind)
    if state_kinds and not _has_any_of(loaded, state_kinds):
        # One finding in place of one for each kind.
        yield f"the optimizer's state is empty {when}"
        kinds = [kind for kind in kinds if kind not in state_kinds]
    for kind in kinds:
        before = saved.of(kind)
        after = loaded.of(kind)
        if kind in saved.not_elementwise:
            # The state has no element for each element of its parameter. It may be one number for
            # each shard; then ranks have different numbers, and which rank gets which one back is
            # not defined.
            unlike_names = _unlike_from_rank_to_rank(before)
            before = _without(before, unlike_names)
            after = _without(after, unlike_names)
        yield from compare(kind, before, after, when)


def _has_any_of(loaded: Values, kinds: Iterable[Kind]) -> bool:
    """Tell whether there is a tensor of one of these kinds."""
    return any(loaded.of(kind) for kind in kinds)


def _unlike_from_rank_to_rank(digests_by_name: Digests) -> set[str]:
    """Return the names that have several digests, as ranks disagree."""
    names: set[str] = set()
    for name, digests in digests_by_name.items():
        if len(digests) > 1:
            names.add(name)
    return names


def _without(digests_by_name: Digests, names: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the digests of all but some names."""
    return {name: digests for name, digests in digests_by_name.items() if name not in names}


@dataclass(frozen=True)
class _DtypeChange:
    """The dtypes of a tensor before and after a load, as words.

    If its parts have several, the words are, for example, "bfloat16 and float32".
    """

    before: str
    after: str


def other_dtypes(saved: Values, loaded: Values, when: str, *, states: bool = True) -> Iterator[str]:
    """Yield a finding for each change of dtype, with all tensors that changed in the same way.

    The arguments are those of ``differences``.
    """
    for kind, dtypes_before in saved.dtypes.items():
        if not states and kind not in {"parameter", "buffer"}:
            continue
        dtypes_after = loaded.dtypes.get(kind, {})
        names_by_change: dict[_DtypeChange, list[str]] = defaultdict(list)
        for name in sorted(dtypes_before.keys() & dtypes_after.keys()):
            before = " and ".join(sorted(dtypes_before[name]))
            after = " and ".join(sorted(dtypes_after[name]))
            if not same_dtype(before, after):
                names_by_change[_DtypeChange(before, after)].append(name)
        for change, names in names_by_change.items():
            yield f"{kind} {and_others(names)}: {change.after} instead of {change.before} {when}"


def same_dtype(before: str, after: str) -> bool:
    """Tell whether the dtypes are the same.

    ``int`` and ``float`` are the types of Python numbers, which equal any dtype: a number that was
    saved may come back as a tensor.
    """
    return before == after or "int" in {before, after} or "float" in {before, after}


def compare(kind: Kind, before: Digests, after: Digests, when: str) -> Iterator[str]:
    """Yield findings for one kind of values, each with all tensors that differ in the same way.

    Args:
        kind: The kind, which begins each finding: ``exp_avg``.
        before: The digests before, by unwrapped name.
        after: The digests after.
        when: The words at the end: ``after the load``.
    """
    for title, names in _changes(kind, before, after).items():
        if names:
            yield f"{kind} {and_others(names)}: {title} {when}"


def _changes(kind: Kind, before: Digests, after: Digests) -> dict[str, set[str]]:
    """Return the names of the tensors that differ, by the words for how they differ.

    The order is that of the findings. ``unlike from rank to rank`` says that replicas differ.
    """
    changes: dict[str, set[str]] = {
        "missing": set(before) - set(after),
        "new": set(after) - set(before),
        "unlike from rank to rank": set(),
        "unlike from rank to rank before, alike": set(),
        "other values": set(),
    }
    for name in before.keys() & after.keys():
        digests_before = before[name]
        digests = after[name]
        # Each rank may fill its own buffer (BatchNorm); then any rank's value may come back, or
        # each rank's own.
        if kind == "buffer" and set(digests) <= set(digests_before):
            continue
        if len(digests) > 1:
            changes["unlike from rank to rank"].add(name)
        # Parts that add up to no whole have no digest; ``Values.wrong`` reports them.
        elif not digests or not digests_before:
            continue
        elif len(digests_before) > 1:
            changes["unlike from rank to rank before, alike"].add(name)
        elif digests != digests_before:
            changes["other values"].add(name)
    return changes


def settings(saved: tuple[Snapshot, ...], loaded: tuple[Snapshot, ...], when: str) -> Iterator[str]:
    """Yield a finding for each number of a scheduler or param group that was not restored.

    ``saved`` and ``loaded`` are the snapshots of all ranks before and after; ``when`` is as in
    ``differences``.
    """
    if not saved:
        return
    # Every rank after the load is compared with the first rank before it.
    before = saved[0]
    for snapshot in loaded:
        rank = f"rank {snapshot.rank}"
        if snapshot.scheduler != before.scheduler:
            yield (
                f"{rank}: scheduler is at {snapshot.scheduler!r} {when}; "
                f"saved at {before.scheduler!r}"
            )
        groups_before = before.param_groups
        groups_after = snapshot.param_groups
        if len(groups_before) != len(groups_after):
            yield (
                f"{rank}: the optimizer has {len(groups_after)} param groups {when}; "
                f"{len(groups_before)} were saved"
            )
        for number in unlike(groups_before, groups_after):
            if number.before is not None and number.after is not None:
                setting = f"{number.key} of the optimizer's group {number.group}"
                yield f"{rank}: {setting} is {number.after} {when}; {number.before} was saved"


@dataclass(frozen=True)
class GroupNumber:
    """A number of a param group, such as its learning rate, before and after."""

    #: The index of the group.
    group: int
    #: The name of the number: ``lr``, ``betas.0``.
    key: str
    #: The number before; None if the group had none of that name.
    before: float | None
    #: The number after; None if the group has none of that name.
    after: float | None


def unlike(
    groups_before: Sequence[Mapping[str, float]],
    groups_after: Sequence[Mapping[str, float]],
    tolerance: float = 0.0,
) -> Iterator[GroupNumber]:
    """Yield the numbers of param groups that differ by more than the relative tolerance."""
    for group, (numbers_before, numbers_after) in enumerate(
        zip(groups_before, groups_after, strict=False)
    ):
        for key in sorted(set(numbers_before) | set(numbers_after)):
            before = numbers_before.get(key)
            after = numbers_after.get(key)
            if (
                before is None
                or after is None
                or not math.isclose(before, after, rel_tol=tolerance)
            ):
                yield GroupNumber(group, key, before, after)


def _not_reached(run: RunTrace, step: Sequence[Snapshot]) -> set[str]:
    """Return the unwrapped names of the parameters without a gradient in one step."""
    unwrapped = run.unwrapped
    if unwrapped is None:
        return set()
    names = Names(run, unwrapped)
    return {names(live) for live in without_gradient(run, step)}


def step_counts(source: RunTrace, run: RunTrace, when: str) -> Iterator[str]:
    """Yield a finding for each step count that differs one step after the resume.

    ``run`` resumed from the save of ``source``, which itself trained on. After one further step
    both must have counted as many steps.

    Other numbers of data parallel ranks train on other rows. What those do not reach, such as a
    layer that only some rows need, is not counted.
    """
    # A step count that several parameters share is counted up more than once a step.
    save = source.at("save")
    next_step: list[Snapshot] = []
    if save:
        for snapshot in source.at_index(save[0].index + 1):
            if snapshot.action == "step":
                next_step.append(snapshot)
    expected = values(source, tuple(next_step)).of("step")
    resumed = values(run, run.at("step")).of("step")
    if Cell.parse(source.cell).dp_size != Cell.parse(run.cell).dp_size:
        not_counted = _not_reached(source, next_step) | _not_reached(run, run.at("step", 0))
        expected = _without(expected, not_counted)
        resumed = _without(resumed, not_counted)
    if resumed:
        yield from compare("step", expected, resumed, f"one step {when}")
