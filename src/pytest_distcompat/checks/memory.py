"""Does the optimizer keep as much as it must, and no more?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.cost import kept, trained_elements
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Trace

#: Shards are rounded up: by so many elements a rank and tensor at most, on the strategies seen.
PADDING = 64


@check(scenario=TRAIN, until=(("train", "step", 2),), order=8)
def memory(cell: Cell, trace: Trace) -> Iterator[str]:
    """Over all ranks together there is one master weight, and one element of each kind of optimizer state, for each trained
    element of the model (for each rank, where every rank holds the whole model), rounding aside; for frozen ones none.

    If it fails: too many, and something is kept twice, or for parameters that nobody trains: memory that few ranks cannot
    spare (https://github.com/deepspeedai/DeepSpeed/pull/8029). Too few, and a part of the model is not optimized.
    """
    life, strategy = trace.life(), STRATEGIES.get(cell.strategy)
    first, moments = life.first("plain"), life.at("step", 2)
    yield from every_rank(moments, cell.world_size, "three steps")
    trained = trained_elements(first.plain.parameters) if first and first.plain else 0
    copies = 1 if strategy.shards or strategy.flat_masters else cell.world_size
    found: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for moment in moments:
        for (key, _), numel in kept(moment).items():
            found[key] += numel
        tensors.update(state.key for state in (moment.optimizer.states if moment.optimizer else ()))
    for key in sorted(found):
        expected, room = trained * copies, PADDING * (tensors[key] or cell.world_size)
        if not expected <= found[key] <= expected + room:
            told = f"{trained} elements are trained{f', on each of {copies} ranks' if copies > 1 else ''}"
            yield f"all ranks together keep {found[key]} elements of {key!r}; {told}, expected {expected}"
    if not found:
        yield "no rank's optimizer keeps anything after three steps"
