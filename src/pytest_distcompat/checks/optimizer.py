"""Check ``optimizer``: the optimizer updates each trainable parameter that the model computes with.

The usual bug is an optimizer that was made before the model was wrapped: it updates tensors that
nobody uses any more.

``judge.judge`` calls the check once the run has ended. It gets a cell, one point of the test matrix
such as ``zero2-bf16_upcast-w2``, and a trace of the run ``train`` (one process group from start to
end). For each rank there is a snapshot after the build and one after three steps, with what the
optimizer holds, and with digests (hashes) of parameters and optimizer state. The check yields
findings, such as ``trainable parameter 'lm_head.weight' did not move in three steps, on any rank``.

ZeRO's optimizers do not hold the parameters themselves. They hold *flat masters*: float32 copies of
many parameters, flattened into one tensor (a partition) on each rank.

A *live* name is that of the wrapped model. The *unwrapped* model is the one before anything wraps
it; it says what is trainable.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check, every_rank, stale
from pytest_distcompat.digests import is_zero
from pytest_distcompat.model_values import (
    is_sharded_along,
    named_stage,
    stages_by_parameter,
    stages_of,
    unused,
)
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    WITHOUT_GRADIENT,
    ParameterInfo,
    RunTrace,
    Snapshot,
    StateInfo,
    Trace,
)

#: Why a parameter that the model uses has no gradient, and what to do: the end of a finding.
_LOST = (
    "a block is recomputed with use_reentrant=True, and none of its inputs requires a gradient; "
    "use_reentrant=False, or enable_input_require_grads() in transformers, gives them theirs"
)


#: Live name -> whether the parameter should be trained.
_Trainable = Mapping[str, bool]
#: Live name -> rank -> the digest of the parameter there.
_Digests = dict[str, dict[int, str]]
#: The rank that has a flat master, and the parameter that the master belongs to.
_MasterKey = tuple[int, str]


@check(scenario=TRAIN, until=(("train", "step", 2),), order=2)
def optimizer(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the optimizer updates every trainable parameter of the live model, and no other.

    The optimizer holds each parameter once, as the model's current tensor; under ZeRO each element
    is in one rank's flat master. A gradient changes each within three steps, unless it is None (not
    zero) on all ranks: then the model does not use it, if no re-entrant recomputation has lost it.

    If it fails: the optimizer was probably made before wrapping. Make it afterwards, or pass both
    to ``prepare`` together.
    """
    run = trace.run()
    built = run.at("build")
    trained = run.at("step", 2)
    yield from every_rank(trained, cell.world_size, "three steps")
    trainable = _trainable(cell, run, built)
    for snapshot in built:
        yield from _entries(snapshot, trainable)
    if STRATEGIES.get(cell.strategy).flat_masters:
        yield from _flat_masters(cell, run, trainable)
    yield from _movements(run, built, trained, trainable)


def _trainable(cell: Cell, run: RunTrace, built: Snapshots) -> _Trainable:
    """Return live name -> whether the parameter should be trained, as the unwrapped model says."""
    strategy = STRATEGIES.get(cell.strategy)
    unwrapped: dict[str, bool] = {}
    if run.unwrapped:
        unwrapped = {info.name: info.trainable for info in run.unwrapped.parameters}
    trainable: dict[str, bool] = {}
    for snapshot in built:
        for info in snapshot.parameters:
            name = strategy.canonical(info.name, cell, unwrapped)
            # A flat or renamed parameter has no counterpart in the unwrapped model; then the live
            # parameter itself says it.
            trainable[info.name] = unwrapped.get(name, info.trainable)
    return trainable


def _entries(snapshot: Snapshot, trainable: _Trainable) -> Iterator[str]:
    """Yield findings unless a rank's optimizer holds each trainable parameter once, and no other.

    ``info.held`` says how many entries of the optimizer are this very tensor.
    """
    where = f"rank {snapshot.rank}"
    if snapshot.optimizer is None or snapshot.model is None:
        yield (
            f"{where}: no optimizer after build; the driver must set self.model and self.optimizer"
        )
        return
    if snapshot.optimizer.foreign:
        yield f"{where}: {stale(snapshot.optimizer)}"
    for info in snapshot.model.parameters:
        # It is None under ZeRO, whose optimizers hold flat masters: see ``_flat_masters``.
        if not trainable[info.name] or info.held in {None, 1}:
            continue
        parameter = f"{where}: trainable parameter {info.name!r}"
        if info.held:
            yield f"{parameter} is in the optimizer {info.held} times; expected once"
        else:
            yield f"{parameter} is not in the optimizer; expected once"


def _flat_masters(cell: Cell, run: RunTrace, trainable: _Trainable) -> Iterator[str]:
    """Yield a finding unless each trainable element is in the flat master of exactly one rank.

    A parameter that tensor parallelism leaves whole is in the flat master of each of its ranks. One
    that several stages of a pipeline have, as tied layers do, is in a flat master of each stage.
    """
    stages = stages_by_parameter(run)
    # Live name -> how many of its elements are in flat masters, on all ranks together.
    elements: Counter[str] = Counter()
    parameters: dict[str, ParameterInfo] = {}
    for snapshot in run.at("build"):
        if snapshot.optimizer:
            elements.update(snapshot.optimizer.partitioned)
        for info in snapshot.parameters:
            parameters[info.name] = info
    for info in parameters.values():
        if not trainable[info.name]:
            continue
        numel = math.prod(info.shape)
        partitioned = elements[info.name]
        copies = cell.tp
        if is_sharded_along(info, "tp"):
            copies = 1
        copies *= len(stages[info.name])
        if partitioned != numel * copies:
            times = "once" if copies == 1 else f"{copies} times"
            yield (
                f"all ranks together: {partitioned} of {numel} elements "
                f"of trainable parameter {info.name!r} are in the optimizer; "
                f"expected each one {times}"
            )


def _movements(
    run: RunTrace,
    built: Snapshots,
    trained: Snapshots,
    trainable: _Trainable,
) -> Iterator[str]:
    """Yield findings for trainable parameters that did not change, and frozen ones that did.

    A parameter changed if it did on any rank. One that the model never uses need not change.
    """
    ranks = _ranks_with_model(built) & _ranks_with_model(trained)
    built_digests = _digests(built)
    moved = _moved(built, trained)
    never_updated = unused(run)
    without_gradient = _without_gradient(trained)
    loses_gradients = _loses_gradients(run)
    for name, is_trainable in trainable.items():
        if not is_trainable:
            if name in moved:
                yield f"frozen parameter {name!r} moved"
        elif name in never_updated:
            if loses_gradients:
                yield f"trainable parameter {name!r} had no gradient in three steps: {_LOST}"
        elif ranks and name not in moved:
            where = "on any rank"
            if stages_of(run):
                holders = sorted(built_digests[name].keys() & ranks)
                where = f"on {named_stage(run, holders)}, where it is"
            yield f"trainable parameter {name!r} did not move in three steps, {where}"
        # Weight decay changes a parameter without a gradient, too. Its state then stays zero.
        elif name in without_gradient:
            yield (
                f"trainable parameter {name!r} had no gradient in three steps: "
                "its state in the optimizer is all zero"
            )
    # Owners that are no parameters are the flat partitions of ZeRO.
    for owner in sorted(without_gradient - trainable.keys()):
        yield f"{owner} of the optimizer had no gradient in three steps: its state is all zero"


def _loses_gradients(run: RunTrace) -> bool:
    """Tell whether re-entrant recomputation lost the gradients of a block, see ``_LOST``."""
    for step in range(3):
        for snapshot in run.at("step", step):
            if snapshot.recomputed.get(WITHOUT_GRADIENT):
                return True
    return False


def _moved(built: Snapshots, trained: Snapshots) -> set[str]:
    """Return the live names of parameters that changed on any rank."""
    before = _digests(built)
    after = _digests(trained)
    ranks = _ranks_with_model(built) & _ranks_with_model(trained)
    moved: set[str] = set()
    for name, digest_by_rank in before.items():
        digest_after_by_rank = after[name]
        for rank in ranks:
            if digest_by_rank.get(rank) != digest_after_by_rank.get(rank):
                moved.add(name)
    if moved:
        # A bfloat16 parameter near 1 takes more than three steps to change by rounding. So a change
        # of its float32 master is enough, if any live parameter changed.
        moved |= _moved_masters(built, trained)
    return moved


def _ranks_with_model(snapshots: Snapshots) -> set[int]:
    """Return the ranks whose snapshot has a model."""
    return {snapshot.rank for snapshot in snapshots if snapshot.model}


def _digests(snapshots: Snapshots) -> _Digests:
    """Return live name -> rank -> digest of the parameter there."""
    digests: _Digests = defaultdict(dict)
    for snapshot in snapshots:
        for info in snapshot.parameters:
            digests[info.name][snapshot.rank] = info.digest
    return digests


def _moved_masters(built: Snapshots, trained: Snapshots) -> set[str]:
    """Return the live names of parameters whose master changed on any rank."""
    before = _master_digests(built)
    after = _master_digests(trained)
    moved: set[str] = set()
    for key in before.keys() & after.keys():
        if before[key] != after[key]:
            _, owner = key
            moved.add(owner)
    return moved


def _master_digests(snapshots: Snapshots) -> dict[_MasterKey, str]:
    """Return (rank, live name) -> digest of the master, for each master on each rank."""
    digests: dict[_MasterKey, str] = {}
    for snapshot in snapshots:
        for state in _states(snapshot):
            if state.key == "master":
                digests[snapshot.rank, state.owner] = state.digest
    return digests


def _states(snapshot: Snapshot) -> tuple[StateInfo, ...]:
    """Return all optimizer state of a rank, with the parts of flat partitions by parameter."""
    return (*snapshot.states, *snapshot.masters)


def _without_gradient(trained: Snapshots) -> set[str]:
    """Return the owners of optimizer state that is all zero on every rank.

    An owner is a parameter or a flat partition. Step counts and masters are not looked at.
    """
    owners: set[str] = set()
    with_gradient: set[str] = set()
    for snapshot in trained:
        for state in _states(snapshot):
            if state.key in {"step", "master"} or not state.numel:
                continue
            owners.add(state.owner)
            if not is_zero(state.digest):
                with_gradient.add(state.owner)
    return owners - with_gradient
