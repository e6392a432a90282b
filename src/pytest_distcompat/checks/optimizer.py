"""Does the optimizer hold and move the parameters that the model computes with?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import LifeTrace, Moment, Trace


@check(scenario=TRAIN, until=(("train", "step", 2),), order=2)
def optimizer(cell: Cell, trace: Trace) -> Iterator[str]:
    """Every trainable parameter is in the optimizer exactly once, as the very tensor that the model holds now (or, under
    ZeRO, with each of its elements in one rank's flat master); each one moves in three steps, and no frozen one does.

    If it fails: the optimizer was probably made before the model was wrapped and holds the old tensors. Make it after,
    or hand both to ``prepare`` together; nothing else tells, the loss just stays where it is.
    """
    life = trace.life()
    built, trained = life.at("build"), life.at("step", 2)
    yield from every_rank(trained, cell.world_size, "three steps")
    for moment in built:
        yield from _held(moment)
    if STRATEGIES.get(cell.strategy).flat_masters:
        yield from _partitions(life, built)
    yield from _moves(built, trained)


def _held(moment: Moment) -> Iterator[str]:
    where = f"rank {moment.rank}"
    if moment.optimizer is None or moment.model is None:
        yield f"{where}: no optimizer after build; the driver must set self.model and self.optimizer"
        return
    if moment.optimizer.foreign:
        yield (
            f"{where}: {moment.optimizer.foreign} of {moment.optimizer.entries} tensors in the optimizer are no parameters "
            "of the live model (stale)"
        )
    for fact in moment.model.parameters:
        if fact.trainable and fact.held is not None and fact.held != 1:
            often = "not in the optimizer" if not fact.held else f"in the optimizer {fact.held} times"
            yield f"{where}: trainable parameter {fact.name!r} is {often}; expected once"


def _partitions(life: LifeTrace, built: tuple[Moment, ...]) -> Iterator[str]:
    """Each element of each trainable parameter is in the flat master of exactly one rank."""
    held: dict[str, int] = defaultdict(int)
    for moment in built:
        for name, numel in (moment.optimizer.partitioned if moment.optimizer else {}).items():
            held[name] += numel
    for fact in built[0].model.parameters if built and built[0].model else ():
        expected = math.prod(fact.shape)
        if fact.trainable and held[fact.name] != expected:
            yield (
                f"all ranks together: {held[fact.name]} of {expected} elements of trainable parameter {fact.name!r} are in "
                "the optimizer; expected each one once"
            )


def _moves(built: tuple[Moment, ...], trained: tuple[Moment, ...]) -> Iterator[str]:
    """A parameter moved if its shard changed on any rank: a rank may hold none of it."""
    before, after = _digests(built), _digests(trained)
    trainable = {fact.name: fact.trainable for moment in built if moment.model for fact in moment.model.parameters}
    still = [name for name, train in trainable.items() if train and before[name] == after[name]]
    for name in still:
        yield f"trainable parameter {name!r} did not move in three steps, on any rank"
    for name, train in trainable.items():
        if not train and before[name] != after[name]:
            yield f"frozen parameter {name!r} moved"


def _digests(moments: tuple[Moment, ...]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for moment in moments:
        for fact in moment.model.parameters if moment.model else ():
            found[fact.name][moment.rank] = fact.digest
    return found
