"""Does the optimizer keep as much state as it must, and no more?"""

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
#: How many elements a strategy may pad each tensor with on each rank; no strategy tried pads more.
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
    """Finding that ranks keep another number of elements of a kind of state than they should.

    Attributes:
        where: The words for the ranks.
        key: The kind of state: a key such as ``exp_avg``.
        kept: How many elements of it the ranks keep.
        trained: How many elements of the model they train that have such state.
        copies: In how many copies they should keep it.
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
        if self.copies <= 1:
            return ""
        if self.copies == self.ranks_of_stage:
            return f", on each of {self.copies} ranks"
        return f", in {self.copies} copies"


def _wrong_sizes(
    cell: Cell, run: RunTrace, snapshots: Snapshots, unwrapped: UnwrappedInfo | None
) -> Iterator[_StateSize]:
    """Yield the kinds of state of which the ranks of a stage keep a wrong number of elements.

    Expected is one element for each trained element that has such state, times the copies in which
    the ranks keep it. With DDP on four ranks that are four copies, with FSDP one, and one over
    ``dp_replicate`` of two are two.

    Args:
        cell: The cell.
        run: The training.
        snapshots: Those of the stage's ranks after three steps.
        unwrapped: What these ranks hold of the unwrapped model.
    """
    strategy = STRATEGIES.get(cell.strategy)
    is_sharded = strategy.shards or strategy.flat_masters
    ranks = [snapshot.rank for snapshot in snapshots]
    ranks_of_stage = cell.world_size // cell.pp
    built = _built_on(run, ranks)
    trained = trained_elements(unwrapped) + _replicated_by_tp(cell, built)
    padding = 0
    if not is_sharded:
        # Each rank has the whole model, but for experts that are spread over ranks.
        trained -= _elements_of_other_experts(built)
        parameter_copies = ranks_of_stage // cell.tp
    elif requested(cell, unwrapped, "dp_replicate"):
        padding = MAX_PADDING
        parameter_copies = int(cell.option("dp_replicate"))
    else:
        padding = MAX_PADDING
        parameter_copies = _copies(built, ranks_of_stage)
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
            without_state = _without_state(snapshots, key, unused(run))
            trained_with_state -= without_state // parameter_copies
        if shards_state and key != "master":
            copies = 1
        expected = trained_with_state * copies
        room = padding * (tensors[key] or ranks_of_stage)
        if expected <= kept[key] <= expected + room:
            continue
        yield _StateSize(where, key, kept[key], trained_with_state, copies, ranks_of_stage)


def _built_on(run: RunTrace, ranks: Collection[int]) -> list[Snapshot]:
    """Return the snapshots of some ranks after build."""
    snapshots: list[Snapshot] = []
    for snapshot in run.at("build"):
        if snapshot.rank in ranks:
            snapshots.append(snapshot)
    return snapshots


def _elements_of_other_experts(built: Sequence[Snapshot]) -> int:
    """Return how many trained elements of experts the first rank does not hold.

    They are on other ranks, over which the experts are spread.
    """
    if not built:
        return 0
    elements = 0
    for info in built[0].parameters:
        if info.trainable:
            elements += info.local_numel * (expert_parts(info) - 1)
    return elements


def _shards_state(snapshots: Sequence[Snapshot]) -> bool:
    """Tell whether the optimizer itself shards its state, not the parameters, over the ranks."""
    for snapshot in snapshots:
        if snapshot.optimizer and ZERO_OPTIMIZER in snapshot.optimizer.chain:
            return True
    return False


def _kept_elements(snapshots: Sequence[Snapshot]) -> Counter[str]:
    """Return how many elements of each kind of state the ranks keep together."""
    kept: Counter[str] = Counter()
    for snapshot in snapshots:
        for (key, _), numel in state_elements(snapshot).items():
            kept[key] += numel * len(snapshot.ranks)
    return kept


def _state_tensors(snapshots: Sequence[Snapshot]) -> Counter[str]:
    """Return how many tensors of each kind of state the ranks keep together."""
    tensors: Counter[str] = Counter()
    for snapshot in snapshots:
        for state in snapshot.states:
            tensors[state.key] += len(snapshot.ranks)
    return tensors


def _keys_by_element(run: RunTrace, snapshots: Sequence[Snapshot], kept: Counter[str]) -> list[str]:
    """Return the kinds of state that have an element for each element of a parameter.

    Args:
        run: The training.
        snapshots: Those of the ranks of one stage after three steps.
        kept: How many elements of each kind these ranks keep. A kind that they lack altogether is
            returned too, if the ranks of other stages keep it for each element.
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
    """Return how many elements tensor parallelism adds to those of the model.

    What it leaves whole is on each of its ranks, and all but one of these are further ones.
    """
    if not built:
        return 0
    first = built[0]
    elements = 0
    for info in first.parameters:
        if info.trainable:
            further_ranks = tp_copies(info, cell, first.rank) - 1
            elements += further_ranks * math.prod(info.shape)
    return elements


def _copies(built: Sequence[Snapshot], size: int) -> int:
    """Return in how many copies ranks hold a sharded model.

    Args:
        built: Snapshots of the ranks after build.
        size: How many ranks they are.
    """
    # Each copy is held by as many ranks as hold together the tensor that is spread widest.
    most_holders = 0
    for snapshot in built:
        layouts = [info.layout for info in snapshot.parameters]
        if snapshot.optimizer:
            layouts += [info.layout for info in snapshot.optimizer.masters]
        for layout in layouts:
            most_holders = max(most_holders, len(layout.holders))
    if most_holders == 0:
        return 1
    return size // most_holders


def _without_state(snapshots: Sequence[Snapshot], key: str, unused: frozenset[str]) -> int:
    """Return how many elements, on all ranks, have no state of a kind.

    Nothing updates the parameters that they belong to.

    Args:
        snapshots: Those of the ranks of one stage after three steps.
        key: The kind of state.
        unused: The names of parameters that nothing updates. Those that have such state all the
            same, or lie in a flat partition, do not count here.
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
    """Return the kinds of state that do not have an element for each element of the parameters.

    These are factors of a moment, kinds of one number for a parameter, and kinds that only some of
    the parameters have.
    """
    numel_by_parameter = {info.name: info.local_numel for info in snapshot.parameters}
    #: The parameters that have state.
    owners = set()
    numel_by_key: dict[str, dict[str, int]] = {}
    for state in snapshot.states:
        if not state.numel or state.key in {"step", "master"}:
            continue
        numel_by_owner = numel_by_key.setdefault(state.key, {})
        # For a parameter of one element the sizes always agree; the size of a partition is not
        # known.
        if numel_by_parameter.get(state.owner, 2) > 1:
            owners.add(state.owner)
            numel_by_owner[state.owner] = state.numel
    keys = set(FACTORS)
    for key, numel_by_owner in numel_by_key.items():
        lacks_owners = not owners.issubset(numel_by_owner)
        if lacks_owners or set(numel_by_owner.values()) <= {1}:
            keys.add(key)
    return keys
