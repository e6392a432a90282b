"""Does the optimizer keep as much state as it must, and no more?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, named_ranks, requested
from pytest_distcompat.checks._values import FACTORS, by_stage, expert_parts, tp_copies, unused
from pytest_distcompat.cost import is_quantized, state_elements, trained_elements
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Snapshot, Trace, UnwrappedInfo

#: torch's ZeRO-1, an optimizer for DDP: https://docs.pytorch.org/docs/stable/distributed.optim.html
ZERO_OPTIMIZER = "ZeroRedundancyOptimizer"
#: How many elements a strategy may pad each tensor with on each rank; no strategy tried pads more.
MAX_PADDING = 64


@check(scenario=TRAIN, until=(("train", "step", 2),), order=8)
def memory(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the optimizer keeps one element of each kind of state for each trained element of the model.

    State is counted over all ranks, or on each rank that holds the whole model (unless ZeroRedundancyOptimizer shards
    the state). Padding, one number per parameter and factors (Adafactor) do not count. What tensor parallelism leaves
    whole has state on each of its ranks. State in 8 bits takes less than two bytes an element, with its scales.

    If it fails: with too many something is kept twice, or for frozen parameters
    (https://github.com/deepspeedai/DeepSpeed/pull/8029); with too few a part of the model is not optimized.
    """
    run = trace.run()
    trained = run.trained
    yield from every_rank(trained, cell.world_size, "three steps")
    for snapshots, part in by_stage(run, trained):
        yield from _kept(cell, run, snapshots, part)
    if cell.option("optimizer") == "adam8bit":
        for snapshot in trained:
            large = [*filter(is_quantized, snapshot.states)]
            numel, size = (sum(getattr(state, name) for state in large) for name in ("numel", "nbytes"))
            if size >= 2 * numel:
                yield f"rank {snapshot.rank}: {numel} elements of quantized state take {size} bytes; expected less than 2 each"
    if not any(map(state_elements, trained)):
        yield "no rank's optimizer keeps anything after three steps"


def _kept(cell: Cell, run: RunTrace, snapshots: tuple[Snapshot, ...], unwrapped: UnwrappedInfo | None) -> Iterator[str]:
    """Yield findings about the state that the ranks of a stage keep, for what they hold of the unwrapped model."""
    strategy, ranks = STRATEGIES.get(cell.strategy), [snapshot.rank for snapshot in snapshots]
    sharded = strategy.shards or strategy.flat_masters
    built, size = tuple(one for one in run.at("build") if one.rank in ranks), cell.world_size // cell.pp
    where = "all ranks" if cell.pp == 1 else named_ranks(ranks, cell.world_size)
    trained = trained_elements(unwrapped) + _replicated_by_tp(cell, built)
    if not sharded:
        # Of the experts each rank has its part.
        infos = (info for info in (built[0].parameters if built else ()) if info.trainable)
        trained -= sum(info.local_numel * (expert_parts(info) - 1) for info in infos)
    others = {key for snapshot in snapshots for key in _of_another_size(snapshot)}
    copies, padding = size // cell.tp, 0
    if sharded:
        declared = requested(cell, unwrapped, "dp_replicate")
        copies, padding = int(cell.option("dp_replicate")) if declared else _copies(built, size), MAX_PADDING
    state_sharded = any(ZERO_OPTIMIZER in snapshot.optimizer.chain for snapshot in snapshots if snapshot.optimizer)
    found, tensors = Counter[str](), Counter[str]()
    for snapshot in snapshots:
        for (key, _), numel in state_elements(snapshot).items():
            found[key] += numel * len(snapshot.ranks)
        for state in snapshot.states:
            tensors[state.key] += len(snapshot.ranks)
    # What this stage lacks altogether, though others keep it for each element.
    lacking = {key for one in run.trained for key, _ in state_elements(one)}.difference(
        found, *map(_of_another_size, run.trained)
    )
    for key in sorted((set(found) - others) | lacking):
        # It shards the state, not the parameters.
        times = 1 if state_sharded and key != "master" else copies
        kept = trained - (0 if key == "master" else _without_state(snapshots, key, unused(run)) // copies)
        expected, room = kept * times, padding * (tensors[key] or size)
        if not expected <= found[key] <= expected + room:
            spread = f"on each of {times} ranks" if times == size else f"in {times} copies"
            context = f"{kept} elements are trained{f', {spread}' if times > 1 else ''}"
            yield f"{where} together keep {found[key]} elements of {key!r}; {context}, expected {expected}"


def _replicated_by_tp(cell: Cell, built: tuple[Snapshot, ...]) -> int:
    """Return the trained elements that tensor parallelism leaves whole on each of its ranks, once for each further rank."""
    if not built:
        return 0
    first = built[0]
    elements = 0
    for info in first.parameters:
        if info.trainable:
            further_ranks = tp_copies(info, cell, first.rank) - 1
            elements += further_ranks * math.prod(info.shape)
    return elements


def _copies(built: tuple[Snapshot, ...], size: int) -> int:
    """Return in how many copies the shards are, on `size` ranks: two where two groups of ranks shard the same model."""
    most_holders = 0
    for snapshot in built:
        layouts = [info.layout for info in snapshot.parameters]
        if snapshot.optimizer:
            layouts.extend(info.layout for info in snapshot.optimizer.masters)
        for layout in layouts:
            most_holders = max(most_holders, len(layout.holders))
    if most_holders == 0:
        return 1
    return size // most_holders


def _without_state(snapshots: tuple[Snapshot, ...], key: str, unused: frozenset[str]) -> int:
    """Return the elements on all ranks of the unused parameters for which no rank keeps state under that key."""
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
    """Return the keys of state that does not have one element for each element that the optimizer updates."""
    numel_by_parameter = {info.name: info.local_numel for info in snapshot.parameters}
    owners = set()
    numel_by_key: dict[str, dict[str, int]] = {}
    for state in snapshot.states:
        if not state.numel or state.key in {"step", "master"}:
            continue
        numel_by_owner = numel_by_key.setdefault(state.key, {})
        # For a parameter of one element the sizes always agree; the size of a partition is not known.
        if numel_by_parameter.get(state.owner, 2) > 1:
            owners.add(state.owner)
            numel_by_owner[state.owner] = state.numel
    keys = set(FACTORS)
    for key, numel_by_owner in numel_by_key.items():
        lacks_owners = not owners.issubset(numel_by_owner)
        if lacks_owners or set(numel_by_owner.values()) <= {1}:
            keys.add(key)
    return keys
