"""Norms of whole gradients, put together from the parts that ranks hold.

The check ``gradients`` calls ``views`` with the snapshots of all ranks after a step: what each rank
recorded of the gradients that its optimizer got. Under DDP each rank has whole gradients. Under
FSDP and ZeRO a rank has a part of each, and the ranks of a shard group have the whole one together:
``(0, 1)`` is the only shard group of FSDP on 2 ranks, ``(0,)`` and ``(1,)`` are those of DDP.

The parts are not gathered. Each is recorded as its number of elements and its sum of squares; the
sums of all parts give the norm. For a parameter of 6 elements on 2 ranks: parts of 3 elements with
squares 9 and 16 make a norm of 5.

Parameters have the names of the unwrapped model, the model before anything wraps it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.checks._base import Snapshots
from pytest_distcompat.model_values import Names, Ranks, pipelines_of
from pytest_distcompat.trace import GradientInfo, RunTrace, shard_groups

#: Unwrapped name of a parameter -> norm of its whole gradient; None if the parts have more or fewer
#: elements than the parameter.
Norms = Mapping[str, float | None]


@dataclass(frozen=True)
class View:
    """Gradients, and the ranks that have them together.

    There is one view of each copy of the model: under DDP on 2 ranks two, under FSDP on 2 ranks
    one. Pipeline parallelism puts the layers on several ranks, in stages; the ranks of one pipeline
    have one view together.

    Attributes:
        ranks: The ranks.
        norms: The norms of the gradients.
    """

    ranks: Ranks
    norms: Norms


def views(run: RunTrace, snapshots: Snapshots) -> Iterator[View]:
    """Yield the view of each copy of the model, from the snapshots of all ranks after a step."""
    norms_by_rank: dict[int, dict[str, float | None]] = {}
    for snapshot in snapshots:
        norms_by_rank[snapshot.rank] = {}
    groups_by_rank: dict[int, set[Ranks]] = defaultdict(set)
    for gradient in _whole_gradients(run, snapshots):
        for rank in gradient.ranks:
            # A rank of the group that ended early has no snapshot.
            if rank in norms_by_rank:
                norms_by_rank[rank][gradient.name] = gradient.norm
                groups_by_rank[rank].add(gradient.ranks)
    for ranks in _ranks_with_same_groups(run, groups_by_rank, sorted(norms_by_rank)):
        norms: dict[str, float | None] = {}
        # If several ranks have the same parameter, the norm of the lowest rank is written last, and
        # stays.
        for rank in reversed(ranks):
            norms.update(norms_by_rank[rank])
        yield View(ranks, norms)


def _ranks_with_same_groups(
    run: RunTrace, groups_by_rank: Mapping[int, set[Ranks]], ranks: Sequence[int]
) -> list[Ranks]:
    """Return the ranks of each view: those whose gradients come from the same shard groups.

    Args:
        run: The run.
        groups_by_rank: Rank -> the shard groups that it has parts in.
        ranks: All ranks, in ascending order.
    """
    # Each rank of a pipeline has the groups of all its stages.
    pipelines = pipelines_of(run)
    ranks_by_groups: dict[frozenset[Ranks], list[int]] = defaultdict(list)
    for rank in ranks:
        groups: set[Ranks] = set()
        for peer in pipelines.get(rank) or (rank,):
            groups.update(groups_by_rank.get(peer, ()))
        # A rank that recorded no gradient has a view of its own, an empty one.
        if not groups:
            groups.add((rank,))
        ranks_by_groups[frozenset(groups)].append(rank)
    return [tuple(members) for members in ranks_by_groups.values()]


@dataclass(frozen=True)
class _WholeGradient:
    """The gradient of a parameter on the ranks of one shard group.

    Attributes:
        name: The parameter's unwrapped name.
        ranks: The ranks of the group.
        norm: The norm; None if the parts of these ranks are not the whole tensor.
    """

    name: str
    ranks: Ranks
    norm: float | None


def _whole_gradients(run: RunTrace, snapshots: Snapshots) -> Iterator[_WholeGradient]:
    """Yield the gradient of each parameter as each shard group has it."""
    # The sizes of whole parameters come from the record of the unwrapped model. A run that ended
    # before it was recorded has none.
    if run.unwrapped is None:
        return
    names = Names(run, run.unwrapped)
    # Unwrapped name -> rank -> the part that the rank holds.
    parts_by_name: dict[str, dict[int, GradientInfo]] = defaultdict(dict)
    for snapshot in snapshots:
        # One step of each optimizer that the trainer has.
        for step in snapshot.steps:
            for info in step.gradients:
                parts_by_name[names(info.name)][snapshot.rank] = info
    for name, part_of_rank in parts_by_name.items():
        # Each rank recorded the ranks that hold one copy of the gradient together with it.
        holders_by_rank = {rank: info.layout.holders for rank, info in part_of_rank.items()}
        for group in shard_groups(holders_by_rank):
            parts: list[GradientInfo] = []
            for rank in group:
                if rank in part_of_rank:
                    parts.append(part_of_rank[rank])
            norm = _whole_norm(parts, names.sizes.get(name))
            yield _WholeGradient(name, group, norm)


def _whole_norm(parts: list[GradientInfo], numel: int | None) -> float | None:
    """Return the norm of the parts together; None if they do not have ``numel`` elements."""
    if sum(info.numel for info in parts) != numel:
        return None
    return math.sqrt(sum(info.square for info in parts))


def norms_of_one_process(run: RunTrace, snapshots: Snapshots) -> Norms:
    """Return the norms of a run of one process, which has one view; empty without a snapshot."""
    for view in views(run, snapshots):
        return view.norms
    return {}
