"""Does training resume from a checkpoint as if it had never stopped, and does saving leave what is trained as it is?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    RESUMED,
    UNTIL_RESUMED,
    and_others,
    check,
    every_rank,
    finite_losses,
    other_mode,
    pairs,
    stale,
    trained_again,
)
from pytest_distcompat.checks._tied import tied_apart
from pytest_distcompat.checks._values import held_states, same_dtype, unlike
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import RESUME, SAVED, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ParameterInfo, RunTrace, Snapshot, Trace

#: Relative. State must come back bit by bit, but a GPU may sum a loss in any order.
LOSS_TOLERANCE = 1e-4

#: Relative. In bfloat16 a sum of more than two numbers depends on their order, and DDP rebuilds its buckets, hence the order,
#: after the first step of a run: the second loss differed by 1e-3 at 4 ranks with all state equal.
ORDER_TOLERANCE = 5e-3

#: Relative. A learning rate may be computed from the number of the step, or from the previous rate.
RATE_TOLERANCE = 1e-9


@check(scenario=RESUME, until=UNTIL_RESUMED, order=4, depends_on=RESUMED)
def resume(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint loaded in a fresh process group restores everything, and that training goes on from it.

    Parameters, optimizer, scheduler and scaler are bit by bit what was saved; the optimizer holds the live parameters, and
    the same ones are trainable. The next two losses and learning rates are those of the uninterrupted run. A buffer that
    each rank fills from its own data (BatchNorm) may come back as any rank saved it
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).

    If it fails: state was not saved, or was loaded into an optimizer that has none before its first step
    (https://github.com/huggingface/accelerate/pull/3904). The first loss depends on parameters only, the second on the
    optimizer too.
    """
    train = trace.run("train")
    resumed = trace.run("resume")
    trained = train.at("step", SAVED - 1)
    saved = train.at("save")
    loaded = resumed.at("load")
    yield from every_rank(trained, cell.world_size, "three steps")
    yield from every_rank(saved, cell.world_size, "save")
    yield from every_rank(loaded, cell.world_size, "load")
    yield from _first_infinite_losses(train)
    yield from trained_again(loaded, _before_save(train))
    for before, after in pairs(trained, saved):
        yield from same_state(before, after, "save")
    saved = _without_nonpersistent_buffers(cell, train, saved)
    loaded = _without_nonpersistent_buffers(cell, train, loaded)
    for before, after in pairs(saved, loaded):
        yield from _other_trained_parameters(before, after)
    if cell.option("save_only_model"):
        for before, after in pairs(saved, loaded):
            yield from _same_model(before, after, "load", _buffers_of_ranks(saved))
        return
    for before, after in pairs(saved, loaded):
        yield from same_state(before, after, "load", _buffers_of_ranks(saved))
        if before.scaler != after.scaler:
            yield f"rank {after.rank}: the gradient scaler is at {after.scaler}; saved at {before.scaler}"
        if before.scheduler != after.scheduler:
            yield f"rank {after.rank}: scheduler is at {after.scheduler!r}; saved at {before.scheduler!r}"
    yield from _later_steps(
        cell, train, resumed, compares_groups=_same_groups_loaded(saved, loaded)
    )


def _first_infinite_losses(train: RunTrace) -> list[str]:
    """Return a finding for each rank with a loss that is not finite in the first step with such losses."""
    for nth in range(SAVED + 2):
        # ``_other_losses`` reports those without a loss.
        with_loss = []
        for snapshot in train.at("step", nth):
            if snapshot.loss is not None:
                with_loss.append(snapshot)
        infinite = list(finite_losses(with_loss, f"step {nth + 1}"))
        if infinite:
            return infinite  # later ones follow from the first
    return []


def _before_save(train: RunTrace) -> list[Snapshot]:
    """Return all ranks' snapshots of the steps before the save."""
    snapshots: list[Snapshot] = []
    for nth in range(SAVED):
        snapshots += train.at("step", nth)
    return snapshots


def _same_groups_loaded(saved: tuple[Snapshot, ...], loaded: tuple[Snapshot, ...]) -> bool:
    """Tell whether each rank loaded the numbers of param groups that it saved."""
    differences: list[str] = []
    for before, after in pairs(saved, loaded):
        differences += _other_groups(before, after, "load")
    return not differences


def _later_steps(
    cell: Cell, train: RunTrace, resumed: RunTrace, *, compares_groups: bool
) -> Iterator[str]:
    """Yield findings for the two steps after the load that are not those of the uninterrupted run after the save.

    Numbers of param groups are compared if ``compares_groups``: those that differ at the load differ after every later step.
    """
    tolerance = ORDER_TOLERANCE
    if PRECISIONS.get(cell.precision).compute == "float32" or cell.world_size <= 2:
        tolerance = LOSS_TOLERANCE
    for nth in (0, 1):
        expected = train.at("step", SAVED + nth)
        steps = resumed.at("step", nth)
        yield from every_rank(expected, cell.world_size, f"step {nth + 1} after the save")
        yield from every_rank(steps, cell.world_size, f"step {nth + 1} after the load")
        if nth == 0:
            for before, after in pairs(expected, steps):
                yield from other_mode(
                    before, after, "step 1 after the load", "in the run that never stopped"
                )
        for text in _other_losses(nth, expected, steps, tolerance):
            yield f"{text}{tied_apart(cell, train)}"
        if compares_groups:
            others = list(_other_numbers(nth, expected, steps))
            yield from others
            compares_groups = not others


#: (digest, dtype) of a tensor.
_Value = tuple[str, str]
#: Name -> value.
_Tensors = Mapping[str, _Value]
#: Name of a buffer -> value of each rank.
_Buffers = Mapping[str, Collection[_Value]]


def _without_nonpersistent_buffers(
    cell: Cell, run: RunTrace, snapshots: tuple[Snapshot, ...]
) -> tuple[Snapshot, ...]:
    """Return the snapshots without buffers that are not persistent: a fresh process makes those anew."""
    if run.unwrapped is None or not run.unwrapped.buffers:
        return snapshots
    strategy = STRATEGIES.get(cell.strategy)
    persistent = {info.name: info.persistent for info in run.unwrapped.buffers}
    kept: list[Snapshot] = []
    for snapshot in snapshots:
        model = snapshot.model
        if model is not None:
            buffers: list[ParameterInfo] = []
            for info in model.buffers:
                name = strategy.canonical(info.name, cell, persistent)
                if persistent.get(name, False):
                    buffers.append(info)
            model = replace(model, buffers=tuple(buffers))
        kept.append(replace(snapshot, model=model))
    return tuple(kept)


def _buffers_of_ranks(snapshots: tuple[Snapshot, ...]) -> _Buffers:
    """Return the values that any rank had, by buffer."""
    values: dict[str, set[_Value]] = defaultdict(set)
    for snapshot in snapshots:
        for info in snapshot.buffers:
            values[info.name].add((info.digest, info.dtype))
    return values


def same_state(
    before: Snapshot, after: Snapshot, action: str, anywhere: _Buffers | None = None
) -> Iterator[str]:
    """Yield findings for state that an action changed although it must not."""
    yield from _same_model(before, after, action, anywhere or {})
    where = f"rank {after.rank}"
    states = _optimizer_states(before)
    states_after = _optimizer_states(after)
    if states and not states_after:
        expected = f"it held {len(states)} tensors before"
        if action == "load":
            expected = f"{len(states)} tensors were saved"
        yield f"{where}: the optimizer's state is empty after the {action}; {expected}"
        return
    yield from _other_tensors(f"{where}: optimizer state", states, states_after, action)
    yield from _other_groups(before, after, action)


def _optimizer_states(snapshot: Snapshot) -> _Tensors:
    """Return the tensors of a rank's optimizer state."""
    states: dict[str, _Value] = {}
    for state in held_states(snapshot):
        states[f"{state.key} of {state.owner}"] = (state.digest, state.dtype)
    return states


def _same_model(
    before: Snapshot, after: Snapshot, action: str, anywhere: _Buffers
) -> Iterator[str]:
    """Yield findings for changed parameters and buffers; a buffer may also have any of its values in ``anywhere``."""
    parameters = _tensors(before.parameters)
    parameters_after = _tensors(after.parameters)
    yield from _other_tensors(f"rank {after.rank}: parameter", parameters, parameters_after, action)
    buffers = _tensors(before.buffers)
    buffers_after = _tensors(after.buffers)
    for name, value in buffers_after.items():
        if name in buffers and value in anywhere.get(name, ()):
            buffers_after[name] = buffers[name]
    yield from _other_tensors(f"rank {after.rank}: buffer", buffers, buffers_after, action)


def _tensors(infos: Iterable[ParameterInfo]) -> dict[str, _Value]:
    """Return the values of parameters or buffers."""
    return {info.name: (info.digest, info.dtype) for info in infos}


def _other_trained_parameters(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield findings unless what is loaded is what the optimizer updates; at a small learning rate two losses do not show it."""
    where = f"rank {after.rank}"
    if before.optimizer and after.optimizer and after.optimizer.foreign > before.optimizer.foreign:
        yield f"{where}: {stale(after.optimizer, ' after the load')}"
    trainable = {info.name: info.trainable for info in before.parameters}
    trainable_after = {info.name: info.trainable for info in after.parameters}
    frozen: list[str] = []
    thawed: list[str] = []
    for name in trainable.keys() & trainable_after.keys():
        if trainable[name] and not trainable_after[name]:
            frozen.append(name)
        elif trainable_after[name] and not trainable[name]:
            thawed.append(name)
    if frozen:
        yield f"{where}: parameter {and_others(frozen)}: frozen after the load, and trained before"
    if thawed:
        yield f"{where}: parameter {and_others(thawed)}: trainable after the load, and frozen before"


def _other_groups(before: Snapshot, after: Snapshot, action: str) -> Iterator[str]:
    """Yield findings for param groups of the optimizer that an action changed: their number, and the numbers of each."""
    where = f"rank {after.rank}"
    groups = before.param_groups
    groups_after = after.param_groups
    if len(groups) != len(groups_after):
        yield f"{where}: the optimizer has {len(groups_after)} param groups after the {action}; {len(groups)} before"
    for number in unlike(groups, groups_after):
        setting = f"{number.key} of the optimizer's group {number.group}"
        yield f"{where}: {setting} is {number.after} after the {action}; {number.before} before"


def _other_tensors(kind: str, before: _Tensors, after: _Tensors, action: str) -> Iterator[str]:
    """Yield findings for tensors that an action removed, added, or changed in value or dtype."""
    other_values: list[str] = []
    other_dtypes: list[str] = []
    for name in before.keys() & after.keys():
        digest, dtype = before[name]
        digest_after, dtype_after = after[name]
        if digest != digest_after:
            other_values.append(name)
        if not same_dtype(dtype, dtype_after):
            other_dtypes.append(name)
    for change, names in (
        ("missing", before.keys() - after.keys()),
        ("new", after.keys() - before.keys()),
        ("other values", other_values),
        ("another dtype", other_dtypes),
    ):
        if names:
            yield f"{kind} {and_others(names)}: {change} after the {action}"


def _other_losses(
    nth: int, expected: tuple[Snapshot, ...], resumed: tuple[Snapshot, ...], tolerance: float
) -> Iterator[str]:
    """Yield findings for losses of a step after the load that are not those of the uninterrupted run, within the tolerance."""
    for before, after in pairs(expected, resumed):
        if before.loss is None or after.loss is None:
            yield f"rank {after.rank}: no loss to compare; expected step() to return it"
        elif math.isfinite(before.loss) and not math.isclose(
            before.loss, after.loss, rel_tol=tolerance
        ):
            loss = f"loss {nth + 1} after the load is {after.loss:.6g}"
            yield f"rank {after.rank}: {loss}; {before.loss:.6g} in the run that never stopped"


def _other_numbers(
    nth: int, expected: tuple[Snapshot, ...], resumed: tuple[Snapshot, ...]
) -> Iterator[str]:
    """Yield findings for numbers of param groups after a step; those of the last step affect no loss."""
    when = f"after step {nth + 1} of the resumed run"
    for before, after in pairs(expected, resumed):
        for number in unlike(before.param_groups, after.param_groups, RATE_TOLERANCE):
            if number.before is None or number.after is None:
                continue
            setting = f"{number.key} of the optimizer's group {number.group}"
            finding = f"{setting} is {number.after:.6g} {when}; {number.before:.6g} in the run that never stopped"
            yield f"rank {after.rank}: {finding}"


@check(scenario=TRAIN, until=(("train", "save", 0), ("train", "exported", 0)), order=9)
def observers(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that neither saving a checkpoint nor exporting the weights changes what is trained.

    Parameters, buffers, optimizer, scheduler, scaler and torch's random state stay equal bit by bit, and the step after a save
    has the same modules in training mode as that before it.

    If it fails: look for a step of the optimizer that creates state to save, for weights that are cast or moved in place, for
    what draws random numbers, and for an evaluation without ``model.train()`` after it.
    """
    train = trace.run("train")
    trained = train.at("step", SAVED - 1)
    for before, after in pairs(trained, train.at("step", SAVED)):
        yield from other_mode(before, after, "the step after the save", "before it")
    yield from _observed(cell, trained, train.at("save"), "save")
    yield from _observed(cell, train.at("export"), train.at("exported"), "export")


def _observed(
    cell: Cell, before_action: tuple[Snapshot, ...], after_action: tuple[Snapshot, ...], action: str
) -> Iterator[str]:
    """Yield findings for what an action changed that should only read."""
    yield from every_rank(after_action, cell.world_size, action)
    for before, after in pairs(before_action, after_action):
        if before.model is None or after.model is None:
            continue  # the driver has no export()
        yield from same_state(before, after, action)
        another = f"is another after the {action}"
        if before.scheduler != after.scheduler:
            yield f"rank {after.rank}: the scheduler {another}"
        if before.scaler != after.scaler:
            yield f"rank {after.rank}: the gradient scaler {another}"
        if before.rng != after.rng:
            yield f"rank {after.rank}: the random state {another}"
        if _trainable_names(before) != _trainable_names(after):
            yield f"rank {after.rank}: the set of trainable parameters {another}"


def _trainable_names(snapshot: Snapshot) -> set[str]:
    return {info.name for info in snapshot.parameters if info.trainable}
