"""Does the optimizer hold and update the parameters that the model computes with?"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, stale
from pytest_distcompat.checks._values import cut_along, named_stage, stages_of, unused
from pytest_distcompat.digests import is_zero
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Snapshot, StateInfo, Trace


@check(scenario=TRAIN, until=(("train", "step", 2),), order=2)
def optimizer(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the optimizer updates every trainable parameter of the live model, and no other.

    The optimizer holds each parameter once, as the model's current tensor; under ZeRO each element is in one rank's
    flat master. A gradient changes each within three steps, unless it is None (not zero) on all ranks.

    If it fails: the optimizer was probably made before wrapping. Make it afterwards, or pass both to ``prepare``
    together.
    """
    run = trace.run()
    built, trained = run.at("build"), run.at("step", 2)
    yield from every_rank(trained, cell.world_size, "three steps")
    trainable = _trainable(cell, run, built)
    for snapshot in built:
        yield from _held(snapshot, trainable)
    if STRATEGIES.get(cell.strategy).flat_masters:
        yield from _partitions(cell, built, trainable)
    yield from _moves(run, built, trained, trainable)


def _trainable(cell: Cell, run: RunTrace, built: tuple[Snapshot, ...]) -> Mapping[str, bool]:
    """Return, for each live name, whether it should be trained: as in the unwrapped model, not as in the trainer."""
    # The live parameter decides where it has no counterpart there: a flat or a renamed one.
    unwrapped = {info.name: info.trainable for info in (run.unwrapped.parameters if run.unwrapped else ())}
    strategy = STRATEGIES.get(cell.strategy)
    return {
        info.name: unwrapped.get(strategy.canonical(info.name, cell, unwrapped), info.trainable)
        for snapshot in built
        for info in snapshot.parameters
    }


def _held(snapshot: Snapshot, trainable: Mapping[str, bool]) -> Iterator[str]:
    where = f"rank {snapshot.rank}"
    if snapshot.optimizer is None or snapshot.model is None:
        yield f"{where}: no optimizer after build; the driver must set self.model and self.optimizer"
        return
    if snapshot.optimizer.foreign:
        yield f"{where}: {stale(snapshot.optimizer)}"
    for info in snapshot.model.parameters:
        if trainable[info.name] and info.held is not None and info.held != 1:
            count = "not in the optimizer" if not info.held else f"in the optimizer {info.held} times"
            yield f"{where}: trainable parameter {info.name!r} is {count}; expected once"


def _partitions(cell: Cell, built: tuple[Snapshot, ...], trainable: Mapping[str, bool]) -> Iterator[str]:
    """Yield a finding unless each element of each trainable parameter is in the flat master of exactly one rank.

    What tensor parallelism leaves whole each of its ranks has.
    """
    held = Counter[str]()
    for snapshot in built:
        held.update(snapshot.optimizer.partitioned if snapshot.optimizer else {})
    for info in {info.name: info for snapshot in built for info in snapshot.parameters}.values():
        expected, times = math.prod(info.shape), 1 if cut_along(info, "tp") else cell.tp
        if trainable[info.name] and held[info.name] != expected * times:
            found = (
                f"{held[info.name]} of {expected} elements of trainable parameter {info.name!r} are in the optimizer"
            )
            often = "once" if times == 1 else f"{times} times"
            yield f"all ranks together: {found}; expected each one {often}"


def _moves(
    run: RunTrace, built: tuple[Snapshot, ...], trained: tuple[Snapshot, ...], trainable: Mapping[str, bool]
) -> Iterator[str]:
    """Yield findings for trainable parameters that no rank changed, unless unused, and for frozen ones that changed."""
    # Of a master its change is enough, if any live parameter changed: a bfloat16 copy near 1 takes more than three steps
    # to change.
    before, after, without_any = _digests(built), _digests(trained), unused(run)
    ranks = {one.rank for one in trained if one.model} & {one.rank for one in built if one.model}
    without_gradient, masters = _without_gradient(trained), _masters_moved(built, trained)
    live = {name for name in trainable if any(before[name].get(rank) != after[name].get(rank) for rank in ranks)}
    for name, train in trainable.items():
        if train and name in without_any:
            continue
        moved = name in live or bool(live and name in masters)
        if train and ranks and not moved:
            holders = sorted(before[name].keys() & ranks)
            where = "on any rank" if not stages_of(run) else f"on {named_stage(run, holders)}, where it is"
            yield f"trainable parameter {name!r} did not move in three steps, {where}"
        elif train and name in without_gradient:
            yield f"trainable parameter {name!r} had no gradient in three steps: its state in the optimizer is all zero"
        elif moved and not train:
            yield f"frozen parameter {name!r} moved"
    for name in sorted(without_gradient - set(trainable)):
        yield f"{name} of the optimizer had no gradient in three steps: its state is all zero"


def _masters_moved(built: tuple[Snapshot, ...], trained: tuple[Snapshot, ...]) -> set[str]:
    """Return the parameters whose master changed on any rank that had one after build."""
    before, after = (
        {(one.rank, state.owner): state.digest for one in some for state in _states(one) if state.key == "master"}
        for some in (built, trained)
    )
    return {owner for (rank, owner), digest in after.items() if before.get((rank, owner), digest) != digest}


def _states(snapshot: Snapshot) -> tuple[StateInfo, ...]:
    """Return the state of live parameters and flat partitions, and the parameters' parts of the partitions."""
    return (*snapshot.states, *snapshot.masters)


def _without_gradient(trained: tuple[Snapshot, ...]) -> set[str]:
    """Return the owners of optimizer state that is all zero on every rank, step counts and masters aside."""
    states = [state for one in trained for state in _states(one) if state.key not in {"step", "master"} and state.numel]
    return {state.owner for state in states} - {state.owner for state in states if not is_zero(state.digest)}


def _digests(snapshots: tuple[Snapshot, ...]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for snapshot in snapshots:
        for info in snapshot.parameters:
            found[info.name][snapshot.rank] = info.digest
    return found
