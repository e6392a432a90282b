"""Does the optimizer hold and move the parameters that the model computes with?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.digests import is_zero
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Moment, RunTrace, StateFact, Trace


@check(scenario=TRAIN, until=(("train", "step", 2),), order=2)
def optimizer(cell: Cell, trace: Trace) -> Iterator[str]:
    """Every parameter that is trainable in the plain model is in the optimizer exactly once, as the very tensor that
    the model holds now (or, under ZeRO, with each of its elements in one rank's flat master); each one moves in three
    steps, by a gradient and not by weight decay alone, and no frozen one does.

    If it fails: the optimizer was probably made before the model was wrapped and holds the old tensors. Make it after,
    or hand both to ``prepare`` together; nothing else tells, the loss just stays where it is.
    """
    run = trace.run()
    built, trained = run.at("build"), run.at("step", 2)
    yield from every_rank(trained, cell.world_size, "three steps")
    trainable = _trainable(cell, run, built)
    for moment in built:
        yield from _held(moment, trainable)
    if STRATEGIES.get(cell.strategy).flat_masters:
        yield from _partitions(built, trainable)
    yield from _moves(built, trained, trainable)


def _trainable(cell: Cell, run: RunTrace, built: tuple[Moment, ...]) -> Mapping[str, bool]:
    """Live name -> whether it is to be trained: as in the plain model, for a trainer may freeze or thaw by mistake.

    Of a live parameter that has no counterpart there (a flat one, a renamed one) only the trainer can tell.
    """
    first = run.first("plain")
    plain = {fact.name: fact.trainable for fact in (first.plain.parameters if first and first.plain else ())}
    strategy = STRATEGIES.get(cell.strategy)
    return {
        fact.name: plain.get(strategy.canonical(fact.name, cell, plain), fact.trainable)
        for moment in built
        for fact in (moment.model.parameters if moment.model else ())
    }


def _held(moment: Moment, trainable: Mapping[str, bool]) -> Iterator[str]:
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
        if trainable[fact.name] and fact.held is not None and fact.held != 1:
            often = "not in the optimizer" if not fact.held else f"in the optimizer {fact.held} times"
            yield f"{where}: trainable parameter {fact.name!r} is {often}; expected once"


def _partitions(built: tuple[Moment, ...], trainable: Mapping[str, bool]) -> Iterator[str]:
    """Each element of each trainable parameter is in the flat master of exactly one rank."""
    held: dict[str, int] = defaultdict(int)
    for moment in built:
        for name, numel in (moment.optimizer.partitioned if moment.optimizer else {}).items():
            held[name] += numel
    for fact in built[0].model.parameters if built and built[0].model else ():
        expected = math.prod(fact.shape)
        if trainable[fact.name] and held[fact.name] != expected:
            yield (
                f"all ranks together: {held[fact.name]} of {expected} elements of trainable parameter {fact.name!r} are in "
                "the optimizer; expected each one once"
            )


def _moves(built: tuple[Moment, ...], trained: tuple[Moment, ...], trainable: Mapping[str, bool]) -> Iterator[str]:
    """A parameter moved if its shard changed on any rank; a rank may hold none of it, a silent one tells nothing.

    Where a master is optimized that is the one to move: at an ordinary learning rate a copy in bfloat16 that is near 1 takes
    more than three steps to. It must be the master of a copy that follows, as some copy must.
    """
    before, after = _digests(built), _digests(trained)
    ranks = {moment.rank for moment in trained if moment.model} & {moment.rank for moment in built if moment.model}
    still, masters = _without_gradient(trained), _masters_moved(built, trained)
    live = {name for name in trainable if any(before[name].get(rank) != after[name].get(rank) for rank in ranks)}
    for name, train in trainable.items():
        moved = name in live or bool(live and name in masters)
        if train and ranks and not moved:
            yield f"trainable parameter {name!r} did not move in three steps, on any rank"
        elif train and name in still:
            yield f"trainable parameter {name!r} had no gradient in three steps: its state in the optimizer is all zero"
        elif moved and not train:
            yield f"frozen parameter {name!r} moved"
    for name in sorted(still - set(trainable)):
        yield f"{name} of the optimizer had no gradient in three steps: its state is all zero"


def _masters_moved(built: tuple[Moment, ...], trained: tuple[Moment, ...]) -> set[str]:
    """Whose master changed on any rank that had one from the start."""
    before, after = (
        {
            (moment.rank, state.owner): state.digest
            for moment in moments
            for state in _states(moment)
            if state.key == "master"
        }
        for moments in (built, trained)
    )
    return {owner for (rank, owner), digest in after.items() if before.get((rank, owner), digest) != digest}


def _states(moment: Moment) -> tuple[StateFact, ...]:
    """Of live parameters and of flat partitions, and of the former what lies in the latter."""
    return (*moment.optimizer.states, *moment.optimizer.masters) if moment.optimizer else ()


def _without_gradient(trained: tuple[Moment, ...]) -> set[str]:
    """Whose state in the optimizer is zero in every element on every rank, the count of steps aside."""
    zero: dict[str, bool] = {}
    for moment in trained:
        for state in _states(moment):
            if state.key not in {"step", "master"} and state.numel:
                zero[state.owner] = zero.get(state.owner, True) and is_zero(state.digest)
    return {owner for owner, all_zero in zero.items() if all_zero}


def _digests(moments: tuple[Moment, ...]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for moment in moments:
        for fact in moment.model.parameters if moment.model else ():
            found[fact.name][moment.rank] = fact.digest
    return found
