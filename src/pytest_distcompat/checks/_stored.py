"""Part of the check ``active``: do ranks store the parameters as often as the strategy says?

Under DDP each rank stores all parameters. Under FSDP and ZeRO-3 the ranks of a shard group store
them once together. So a strategy that shards nothing in silence shows in the number of copies.

``checks.active`` calls ``wrongly_stored_parameters`` with the snapshots after the build: what each
rank recorded of its parameters. It yields findings, such as ``all ranks together store 2.00 copies
of the parameters; expected 1, each rank its shard``.

Elements are counted, so no tensor is gathered. Some parameters are not counted: those of
``ignored_modules``, which the cell excludes from sharding. The *unwrapped* model is the one before
anything wraps it; it says which parameters there are and how large they are. A *live* name is that
of the wrapped model, ``module.lm_head.weight``; ``Strategy.canonical`` makes ``lm_head.weight`` of
it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, requested
from pytest_distcompat.model_values import Ranks, expert_parts, tp_copies
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ParameterInfo, RunTrace, Snapshot, UnwrappedInfo, shard_groups
from pytest_distcompat.wording import named_ranks


@dataclass(frozen=True)
class _Holder:
    """A rank, and the ranks that it stands for because they hold as much.

    A rank stands for itself alone, unless one process was run in place of all ranks
    (``--distcompat-simulate``).

    Attributes:
        snapshot: The rank's snapshot.
        ranks: All ranks that it stands for, itself included.
    """

    snapshot: Snapshot
    ranks: frozenset[int]


@dataclass(frozen=True)
class _StoredModel:
    """The parameters that the ranks of one pipeline stage should store together.

    Without a pipeline they are those of the whole model.

    Attributes:
        cell: The cell.
        full_numel_by_name: The number of elements of each parameter, by unwrapped name.
        is_ignored: Returns whether a parameter is excluded from sharding, given its live or its
            unwrapped name.
    """

    cell: Cell
    full_numel_by_name: Mapping[str, int]
    is_ignored: Callable[[str], bool]

    @property
    def numel(self) -> int:
        """Return the number of elements of all parameters that are not ignored."""
        total = 0
        for name, numel in self.full_numel_by_name.items():
            if not self.is_ignored(name):
                total += numel
        return total

    def copies(self, holders: Iterable[_Holder]) -> float:
        """Return how many copies of these parameters the holders store together: 1.0 or 2.0."""
        stored: list[float] = []
        for holder in holders:
            rank = holder.snapshot.rank
            for info in holder.snapshot.parameters:
                if self.is_ignored(info.name):
                    continue
                elements = _stored_elements(info, self.cell, rank)
                stored.append(elements * len(holder.ranks))
        return sum(stored) / self.numel


def wrongly_stored_parameters(
    cell: Cell, run: RunTrace, built: Snapshots, unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield findings if the ranks do not store each parameter as often as they should.

    The ranks of a shard group store it once together if parameters are sharded. Each rank stores it
    once if they are replicated.

    Args:
        cell: The cell, such as ``fsdp2-fp32-w2``.
        run: The run.
        built: The snapshots after the build: of all ranks, or of those of one pipeline stage (a
            part of the layers that pipeline parallelism puts on some ranks).
        unwrapped: The unwrapped model, or the part of it that this stage has; None if it was not
            recorded.
    """
    full_numel_by_name: dict[str, int] = {}
    if unwrapped is not None:
        for info in unwrapped.parameters:
            full_numel_by_name[info.name] = math.prod(info.shape)
    model = _StoredModel(cell, full_numel_by_name, ignored_predicate(cell, run))
    if not model.numel:
        yield "the unwrapped model has no parameters, or was not recorded"
    elif not STRATEGIES.get(cell.strategy).shards:
        yield from _replicated(model, built)
    else:
        yield from _sharded(model, run, built, unwrapped)


def _replicated(model: _StoredModel, built: Snapshots) -> Iterator[str]:
    """Yield a finding unless each rank stores all parameters.

    Under tensor parallelism each rank stores its part of them.
    """
    cell = model.cell
    expected = cell.world_size // cell.pp // cell.tp
    holders: list[_Holder] = []
    for snapshot in built:
        holders.append(_Holder(snapshot, frozenset(snapshot.ranks)))
    copies = model.copies(holders)
    # The number of copies is a sum of fractions, so it is not compared exactly.
    if abs(copies - expected) <= 0.01:
        return
    where = "all ranks"
    if cell.pp > 1:
        ranks = [snapshot.rank for snapshot in built]
        where = named_ranks(ranks, cell.world_size)
    place = "rank"
    if cell.tp > 1:
        place = f"{cell.tp} ranks of tensor parallelism"
    stored = f"{where} together store {copies:.2f} copies of the parameters"
    yield f"{stored}; expected {expected}, one a {place}"


def _sharded(
    model: _StoredModel, run: RunTrace, built: Snapshots, unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield findings unless the ranks of each shard group store the parameters once together.

    A shard group is the ranks that hold one copy together. Under hybrid sharding (HSDP,
    ``dp_replicate=2``) there are several: ranks 0, 1 and ranks 2, 3.
    """
    cell = model.cell
    # The number of ranks of a pipeline stage.
    size = cell.world_size // cell.pp
    groups = _shard_groups(model, built)
    replicas = len(groups)
    if not run.has_every_rank:
        # One process stands in for ranks, so that only some groups are known. All have one size.
        replicas = size // len(groups[0])
    # Each of several ranks holds a copy of its own.
    unsharded = replicas == size > 1
    expected = cell.option("dp_replicate")
    if unsharded or (requested(cell, unwrapped, "dp_replicate") and replicas != expected):
        ranks_of_groups = "; ".join(named_ranks(ranks, cell.world_size) for ranks in groups)
        expectation = f"expected {expected}"
        if unsharded:
            expectation += ", of several ranks"
        yield f"shards are in {replicas} copies ({ranks_of_groups}); {expectation}"
    # A single rank has nothing to shard with.
    if size == 1:
        return
    for ranks in groups:
        where = named_ranks(ranks, cell.world_size)
        for text in _shard_group(model, ranks, built):
            yield f"{where} together store {text}"


def _shard_groups(model: _StoredModel, built: Snapshots) -> tuple[Ranks, ...]:
    """Return the ranks of each copy of the model: ``((0, 1), (2, 3))`` for two copies."""
    # Rank -> the ranks that hold a copy together with it.
    holders: dict[int, set[int]] = defaultdict(set)
    for snapshot in built:
        for info in snapshot.parameters:
            if not model.is_ignored(info.name):
                # The ranks that hold one copy of this parameter together.
                holders[snapshot.rank].update(info.layout.holders)
                holders[snapshot.rank].add(snapshot.rank)
    sorted_holders: dict[int, Ranks] = {}
    for rank, ranks in holders.items():
        sorted_holders[rank] = tuple(sorted(ranks))
    return shard_groups(sorted_holders, model.cell.world_size)


def _shard_group(model: _StoredModel, ranks: Ranks, built: Snapshots) -> Iterator[str]:
    """Yield texts about what the ranks of a shard group store, unless it is each parameter once."""
    holders: list[_Holder] = []
    for snapshot in built:
        group_ranks = frozenset(snapshot.ranks).intersection(ranks)
        if group_ranks:
            holders.append(_Holder(snapshot, group_ranks))
    copies = model.copies(holders)
    # More than one copy may be padding: ZeRO-3 pads every shard, which shows on tiny parameters.
    # Half way to a copy on each rank it is no padding any more.
    most = max(1.01, (1 + len(ranks)) / 2)
    if not 0.99 <= copies < most:
        yield f"{copies:.2f} copies of the parameters; expected 1, each rank its shard"
        return
    yield from _parameters_not_stored_once(model, holders)


def _parameters_not_stored_once(model: _StoredModel, holders: list[_Holder]) -> Iterator[str]:
    """Yield a text for each parameter that the ranks do not store once together.

    The sum over all parameters hardly shows a small one.
    """
    # Flat parameters have no names to compare by. A parameter without a live counterpart is a
    # finding of the check ``names``.
    cell = model.cell
    strategy = STRATEGIES.get(cell.strategy)
    stored_by_name: dict[str, float] = defaultdict(float)
    # The names of parameters that are cut as a flattened tensor, as FSDP1 and ZeRO-3 do.
    flat: set[str] = set()
    ranks = 0
    for holder in holders:
        ranks += len(holder.ranks)
        for info in holder.snapshot.parameters:
            name = strategy.canonical(info.name, cell, model.full_numel_by_name)
            elements = _stored_elements(info, cell, holder.snapshot.rank)
            stored_by_name[name] += elements * len(holder.ranks)
            if info.layout.flat:
                flat.add(name)
    for name, numel in model.full_numel_by_name.items():
        if name not in stored_by_name or model.is_ignored(name):
            continue
        stored = stored_by_name[name]
        most: float = numel
        if name in flat:
            # A flattened tensor is padded, see ``_shard_group``.
            padded_once = numel + ranks - 1
            most = max(padded_once, numel * (1 + ranks) / 2)
        if not numel <= stored <= most:
            yield f"{stored:g} elements of {name!r}, which has {numel}; expected each one once"


def _stored_elements(info: ParameterInfo, cell: Cell, rank: int) -> float:
    """Return how many elements of a parameter the rank contributes to the sum over all ranks.

    If all ranks of tensor parallelism store the same, each contributes a part, so that it counts
    once in the sum. An expert of DeepSpeed's expert parallelism is on this rank in place of the
    experts of other ranks, so it contributes for these too.
    """
    # Over how many ranks experts are spread; 1 for other parameters.
    elements = info.local_numel * expert_parts(info)
    # How many ranks of this rank's tensor-parallel group store the same; 1 for what is sharded.
    return elements / tp_copies(info, cell, rank)


def ignored_predicate(cell: Cell, run: RunTrace) -> Callable[[str], bool]:
    """Return a function: whether a parameter with that live name is excluded from sharding.

    Such parameters are in ``ignored_modules`` of the cell. The check ``units`` looks at them.
    """
    strategy = STRATEGIES.get(cell.strategy)
    unwrapped = run.unwrapped or UnwrappedInfo(())
    names = {info.name for info in unwrapped.parameters}
    prefixes = tuple(f"{module}." for module in unwrapped.ignored_modules)

    def is_ignored(live: str) -> bool:
        if not prefixes:
            return False
        return strategy.canonical(live, cell, names).startswith(prefixes)

    return is_ignored
