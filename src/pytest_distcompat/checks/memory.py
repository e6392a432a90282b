"""Check ``memory``: the optimizer keeps as much state as it must, and no more.

Adam keeps two numbers for each trained element: ``exp_avg`` and ``exp_avg_sq``. Under DDP each rank
keeps them for the whole model; under FSDP and ZeRO all ranks keep them once together. More means
that something is kept twice, less that a part of the model is not trained.

``judge.judge`` calls the check once the run has ended. It gets a cell, one point of the test matrix
such as ``fsdp2-fp32-w2``, and a trace of the run ``train`` (one process group from start to end)
with a snapshot of each rank after three steps. Elements are counted, not bytes. It yields findings,
such as ``all ranks together keep 2000 elements of 'exp_avg'; 1000 elements are trained, expected
1000``.

A *kind of state* is a key of the optimizer's state, such as ``exp_avg``, or ``master``: the float32
copies of parameters that ZeRO's optimizer updates. A *stage* is the part of the layers that
pipeline parallelism (``pp``) puts on some ranks; without a pipeline all ranks are one stage.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank, requested
from pytest_distcompat.cost import is_quantized, state_elements, trained_elements
from pytest_distcompat.model_values import FACTORS, by_stage, expert_parts, tp_copies, unused
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Snapshot, Trace, UnwrappedInfo
from pytest_distcompat.wording import named_ranks

#: torch's ZeRO-1, an optimizer for DDP: https://docs.pytorch.org/docs/stable/distributed.optim.html
ZERO_OPTIMIZER = "ZeroRedundancyOptimizer"
#: A sharding strategy may pad each tensor by this many elements on each rank. None pads more.
MAX_PADDING = 64


@check(scenario=TRAIN, until=(("train", "step", 2),), order=8)
def memory(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the optimizer keeps one element of each kind of state for each trained element.

    State is counted over all ranks, or on each rank that holds the whole model (unless
    ZeroRedundancyOptimizer shards the state). Padding, one number per parameter and factors
    (Adafactor) do not count. What tensor parallelism leaves whole has state on each of its ranks.
    State in 8 bits takes less than two bytes an element, with its scales.

    If it fails: with too many something is kept twice, or for frozen parameters
    (https://github.com/deepspeedai/DeepSpeed/pull/8029); with too few a part of the model is not
    optimized.
    """
    run = trace.run()
    trained = run.trained
    yield from every_rank(trained, cell.world_size, "three steps")
    for stage_snapshots, stage_model in by_stage(run, trained):
        for size in _wrong_sizes(cell, run, stage_snapshots, stage_model):
            yield str(size)
    if cell.option("optimizer") == "adam8bit":
        for snapshot in trained:
            yield from _too_large_quantized(snapshot)
    if not any(state_elements(snapshot) for snapshot in trained):
        yield "no rank's optimizer keeps anything after three steps"


def _too_large_quantized(snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if quantized state takes two bytes an element or more, with its scales."""
    numel = 0
    size = 0
    for state in snapshot.states:
        if is_quantized(state):
            numel += state.numel
            size += state.nbytes
    if size >= 2 * numel:
        yield (
            f"rank {snapshot.rank}: {numel} elements of quantized state take {size} bytes; "
            "expected less than 2 each"
        )


@dataclass(frozen=True)
class _StateSize:
    """Finding that ranks keep too many or too few elements of a kind of state.

    Attributes:
        where: The words for the ranks: ``all ranks``.
        key: The kind of state: ``exp_avg``.
        kept: How many elements of it the ranks keep together.
        trained: How many elements of the model have such state.
        copies: How many copies the ranks should keep together: under DDP one on each rank.
        ranks_of_stage: How many ranks they are.
    """

    where: str
    key: str
    kept: int
    trained: int
    copies: int
    ranks_of_stage: int

    def __str__(self) -> str:
        expected = self.trained * self.copies
        return (
            f"{self.where} together keep {self.kept} elements of {self.key!r}; "
            f"{self.trained} elements are trained{self._spread}, expected {expected}"
        )

    @property
    def _spread(self) -> str:
        """Return the words for where the copies are: ``, on each of 2 ranks``; empty for one."""
        if self.copies <= 1:
            return ""
        if self.copies == self.ranks_of_stage:
            return f", on each of {self.copies} ranks"
        return f", in {self.copies} copies"


def _wrong_sizes(
    cell: Cell, run: RunTrace, snapshots: Snapshots, unwrapped: UnwrappedInfo | None
) -> Iterator[_StateSize]:
    """Yield the kinds of state of which the ranks of a stage keep a wrong number of elements.

    One element is expected for each trained element, times the number of copies. On four ranks DDP
    has four copies, FSDP one, and hybrid sharding with ``dp_replicate`` 2 two.

    Args:
        cell: The cell.
        run: The run ``train``.
        snapshots: The snapshots of the stage's ranks after three steps.
        unwrapped: The stage's part of the unwrapped model (the model before anything wraps it).
    """
    strategy = STRATEGIES.get(cell.strategy)
    is_sharded = strategy.shards or strategy.flat_masters
    ranks = [snapshot.rank for snapshot in snapshots]
    ranks_of_stage = cell.world_size // cell.pp
    built = _built_on(run, ranks)
    # ``_parameter_copies`` counts the ranks of a tensor-parallel group as one copy of the model.
    # What this group replicates has state on each of them, so it counts as trained once for each.
    trained = trained_elements(unwrapped) + _replicated_by_tp(cell, built)
    padding = MAX_PADDING
    if not is_sharded:
        # Each rank has the whole model, except experts that expert parallelism puts on other ranks.
        trained -= _elements_of_other_experts(built)
        padding = 0
    parameter_copies = _parameter_copies(cell, built, unwrapped, is_sharded=is_sharded)
    shards_state = _shards_state(snapshots)
    kept = _kept_elements(snapshots)
    tensors = _state_tensors(snapshots)
    where = "all ranks"
    if cell.pp > 1:
        where = named_ranks(ranks, cell.world_size)
    for key in _keys_by_element(run, snapshots, kept):
        trained_with_state = trained
        copies = parameter_copies
        if key != "master":
            # Counted on all ranks, so once for each copy; ``trained`` counts one copy.
            without_state = _without_state(snapshots, key, unused(run))
            trained_with_state -= without_state // parameter_copies
        if shards_state and key != "master":
            copies = 1
        expected = trained_with_state * copies
        # How many elements of padding are allowed: so many for each tensor of state. ``tensors``
        # has no masters, of which each rank has one partition.
        room = padding * (tensors[key] or ranks_of_stage)
        if expected <= kept[key] <= expected + room:
            continue
        yield _StateSize(where, key, kept[key], trained_with_state, copies, ranks_of_stage)


def _parameter_copies(
    cell: Cell, built: Sequence[Snapshot], unwrapped: UnwrappedInfo | None, *, is_sharded: bool
) -> int:
    """Return how many copies of the parameters the ranks of a stage should hold together.

    Args:
        cell: The cell.
        built: The snapshots of these ranks after the build.
        unwrapped: The stage's part of the unwrapped model.
        is_sharded: Whether the strategy shards parameters or masters.
    """
    ranks_of_stage = cell.world_size // cell.pp
    if not is_sharded:
        return ranks_of_stage // cell.tp
    if requested(cell, unwrapped, "dp_replicate"):
        return int(cell.option("dp_replicate"))
    return _copies(built, ranks_of_stage)


def _built_on(run: RunTrace, ranks: Collection[int]) -> list[Snapshot]:
    """Return the snapshots of these ranks after the build."""
    snapshots: list[Snapshot] = []
    for snapshot in run.at("build"):
        if snapshot.rank in ranks:
            snapshots.append(snapshot)
    return snapshots


def _elements_of_other_experts(built: Sequence[Snapshot]) -> int:
    """Return how many trained elements of experts are on other ranks than the first.

    Expert parallelism spreads the experts evenly over ``expert_parts`` ranks.
    """
    if not built:
        return 0
    elements = 0
    for info in built[0].parameters:
        if info.trainable:
            # 1 for a parameter that is no expert's.
            parts = expert_parts(info)
            elements += info.local_numel * (parts - 1)
    return elements


def _shards_state(snapshots: Sequence[Snapshot]) -> bool:
    """Tell whether it is torch's ZeroRedundancyOptimizer, which shards its state alone."""
    for snapshot in snapshots:
        if snapshot.optimizer and ZERO_OPTIMIZER in snapshot.optimizer.chain:
            return True
    return False


def _kept_elements(snapshots: Sequence[Snapshot]) -> Counter[str]:
    """Return kind of state -> how many elements of it the ranks keep together."""
    kept: Counter[str] = Counter()
    for snapshot in snapshots:
        # A snapshot is of one rank; or of several, where an extension let one process stand for
        # all of them. ``state_elements`` counts by key and dtype, here for all dtypes.
        for (key, _), numel in state_elements(snapshot).items():
            kept[key] += numel * len(snapshot.ranks)
    return kept


def _state_tensors(snapshots: Sequence[Snapshot]) -> Counter[str]:
    """Return kind of state -> how many tensors of it the ranks keep together."""
    tensors: Counter[str] = Counter()
    for snapshot in snapshots:
        for state in snapshot.states:
            tensors[state.key] += len(snapshot.ranks)
    return tensors


def _keys_by_element(run: RunTrace, snapshots: Sequence[Snapshot], kept: Counter[str]) -> list[str]:
    """Return the kinds of state that have one element for each element of a parameter.

    A kind that only the ranks of other stages have is returned too: these ranks lack it.

    Args:
        run: The run ``train``.
        snapshots: The snapshots of the ranks of one stage after three steps.
        kept: Kind of state -> how many elements of it these ranks keep.
    """
    keys = set(kept)
    for snapshot in snapshots:
        keys -= _of_another_size(snapshot)
    lacking: set[str] = set()
    for snapshot in run.trained:
        for key, _ in state_elements(snapshot):
            lacking.add(key)
    lacking -= set(kept)
    for snapshot in run.trained:
        lacking -= _of_another_size(snapshot)
    return sorted(keys | lacking)


def _replicated_by_tp(cell: Cell, built: Sequence[Snapshot]) -> int:
    """Return how many elements are trained several times because of tensor parallelism.

    A parameter that it leaves whole, such as a norm, is on each of its ranks. All but one of them
    count here.
    """
    if not built:
        return 0
    first = built[0]
    elements = 0
    for info in first.parameters:
        if info.trainable:
            # ``tp_copies``: 1 for a parameter that is split, ``tp`` for one that each rank has.
            further_ranks = tp_copies(info, cell, first.rank) - 1
            elements += further_ranks * math.prod(info.shape)
    return elements


def _copies(built: Sequence[Snapshot], size: int) -> int:
    """Return how many copies of a sharded model the ranks hold together.

    Args:
        built: The snapshots of the ranks after the build.
        size: How many ranks they are.
    """
    # A layout's ``holders`` are the ranks that hold one copy of a tensor together. As many ranks
    # hold a copy of the model as hold the tensor that is spread over most ranks.
    most_holders = 0
    for snapshot in built:
        layouts = [info.layout for info in snapshot.parameters]
        if snapshot.optimizer:
            layouts += [info.layout for info in snapshot.optimizer.masters]
        for layout in layouts:
            most_holders = max(most_holders, len(layout.holders))
    if most_holders == 0:
        return 1
    # More ranks than should hold a stage may do so. The check ``active`` tells of that.
    return max(1, size // most_holders)


def _without_state(snapshots: Sequence[Snapshot], key: str, unused: frozenset[str]) -> int:
    """Return how many elements on all ranks have no state of a kind, since nothing updates them.

    A parameter that has such state all the same is not counted. Nor is one in a flat partition of
    ZeRO, which has state for all of its elements.

    Args:
        snapshots: The snapshots of the ranks of one stage after three steps.
        key: The kind of state.
        unused: The live names of parameters that never got a gradient.
    """
    without = set(unused)
    for snapshot in snapshots:
        if snapshot.optimizer:
            without.difference_update(snapshot.optimizer.partitioned)
            for state in snapshot.optimizer.states:
                if state.key == key:
                    without.discard(state.owner)
    elements = 0
    for snapshot in snapshots:
        for info in snapshot.parameters:
            if info.name in without:
                elements += info.local_numel * len(snapshot.ranks)
    return elements


def _of_another_size(snapshot: Snapshot) -> set[str]:
    """Return the kinds of state that do not have one element for each element of the parameters.

    They are factors of a moment (Adafactor's rows and columns), kinds with one number for a
    parameter (NAdam's ``mu_product``), and kinds that only some parameters have.
    """
    numel_by_parameter = {info.name: info.local_numel for info in snapshot.parameters}
    # The parameters that have state.
    owners = set()
    # Kind of state -> parameter -> number of elements.
    numel_by_key: dict[str, dict[str, int]] = {}
    for state in snapshot.states:
        if not state.numel or state.key in {"step", "master"}:
            continue
        numel_by_owner = numel_by_key.setdefault(state.key, {})
        # A parameter of one element tells nothing: one number has the same size. The size of a flat
        # partition is not known, and is taken for a large one (2).
        if numel_by_parameter.get(state.owner, 2) > 1:
            owners.add(state.owner)
            numel_by_owner[state.owner] = state.numel
    keys = set(FACTORS)
    for key, numel_by_owner in numel_by_key.items():
        lacks_owners = not owners.issubset(numel_by_owner)
        if lacks_owners or set(numel_by_owner.values()) <= {1}:
            keys.add(key)
    return keys
