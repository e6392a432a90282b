"""Does the optimizer keep as much as it must, and no more?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import asked, check, every_rank
from pytest_distcompat.checks._values import FACTORS
from pytest_distcompat.cost import state_elements, trained_elements
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Snapshot, Trace

#: torch's own ZeRO-1, an optimizer for DDP: https://docs.pytorch.org/docs/stable/distributed.optim.html
SHARING_OUT = "ZeroRedundancyOptimizer"
#: Shards are rounded up: by so many elements a rank and tensor at most, on the strategies seen.
PADDING = 64


@check(scenario=TRAIN, until=(("train", "step", 2),), order=8)
def memory(cell: Cell, trace: Trace) -> Iterator[str]:
    """Over all ranks together there is one master weight, and one element of each kind of optimizer state, for each trained
    element of the model (for each rank, where every rank holds the whole model; there ZeroRedundancyOptimizer keeps one of each
    state), rounding aside; for frozen ones none. State that is a number, or a factor of what it stands for (Adafactor), is not
    counted, nor is what some parameters only have.

    If it fails: too many, and something is kept twice, or for parameters that nobody trains: memory that few ranks cannot
    spare (https://github.com/deepspeedai/DeepSpeed/pull/8029). Too few, and a part of the model is not optimized.
    """
    run, strategy = trace.run(), STRATEGIES.get(cell.strategy)
    first, snapshots = run.first("build_model"), run.at("step", 2)
    yield from every_rank(snapshots, cell.world_size, "three steps")
    trained = trained_elements(first.unwrapped.parameters) if first and first.unwrapped else 0
    others = {key for snapshot in snapshots for key in _of_another_size(snapshot)}
    copies, padding = cell.world_size, 0
    if strategy.shards or strategy.flat_masters:
        told = asked(cell, first.unwrapped if first else None, "dp_replicate")
        copies, padding = int(cell.option("dp_replicate")) if told else len(run.replicas), PADDING
    shared_out = any(SHARING_OUT in snapshot.optimizer.chain for snapshot in snapshots if snapshot.optimizer)
    found: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for snapshot in snapshots:
        for (key, _), numel in state_elements(snapshot).items():
            found[key] += numel
        tensors.update(state.key for state in (snapshot.optimizer.states if snapshot.optimizer else ()))
    for key in sorted(set(found) - others):
        # Each rank still has all of the parameters themselves.
        times = 1 if shared_out and key != "master" else copies
        expected, room = trained * times, padding * (tensors[key] or cell.world_size)
        if not expected <= found[key] <= expected + room:
            where = f"on each of {times} ranks" if times == cell.world_size else f"in {times} copies"
            some = f"{trained} elements are trained{f', {where}' if times > 1 else ''}"
            yield f"all ranks together keep {found[key]} elements of {key!r}; {some}, expected {expected}"
    if not found:
        yield "no rank's optimizer keeps anything after three steps"


def _of_another_size(snapshot: Snapshot) -> set[str]:
    """The keys under which the optimizer keeps something else than an element for each that it updates."""
    states = [
        state
        for state in (snapshot.optimizer.states if snapshot.optimizer else ())
        if state.numel and state.key not in {"step", "master"}
    ]
    sizes = {info.name: info.local_numel for info in (snapshot.model.parameters if snapshot.model else ())}
    # What has one element itself tells nothing; of a partition the size is not known.
    owners = {state.owner for state in states if sizes.get(state.owner, 2) > 1}
    found = set(FACTORS)
    for key in {state.key for state in states}:
        held = {state.owner: state.numel for state in states if state.key == key and state.owner in owners}
        found |= {key} if owners - held.keys() or all(numel == 1 for numel in held.values()) else set()
    return found
