"""Does training resume from a checkpoint as if it had never stopped? Does saving change nothing?"""

from __future__ import annotations

import abc
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    RESUMED,
    UNTIL_RESUMED,
    Snapshots,
    check,
    every_rank,
    finite_losses,
    not_evaluated,
    other_mode,
    pairs,
    resume_runs,
    stale,
    trained_again,
)
from pytest_distcompat.checks._tied import tied_apart
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import (
    GroupNumber,
    held_states,
    same_dtype,
    trainable_names,
    unlike,
)
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import EVALUATE, SAVED, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ParameterInfo, RunTrace, Snapshot, Trace
from pytest_distcompat.wording import and_others

#: Relative tolerance of losses. State must come back bit by bit, but a GPU may sum a loss in any
#: order.
LOSS_TOLERANCE = 1e-4

#: Relative tolerance of losses in lower precision on more than two ranks. There a sum depends on
#: the order of its terms, and DDP changes the order when it rebuilds its buckets after the first
#: step of a run: with equal state the second loss differed by 1e-3 on 4 ranks.
ORDER_TOLERANCE = 5e-3

#: Relative tolerance of learning rates. A schedule may compute a rate from the number of the step,
#: or from the previous rate.
RATE_TOLERANCE = 1e-9


@check(scenario=resume_runs, until=UNTIL_RESUMED, order=4, depends_on=RESUMED)
def resume(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a fresh process group restores all from a checkpoint, and goes on training.

    Parameters, optimizer, scheduler and scaler are bit by bit what was saved; the optimizer holds
    the live parameters, and the same ones are trainable. The next two losses and learning rates are
    those of the uninterrupted run. A buffer that each rank fills from its own data (BatchNorm) may
    come back as any rank saved it
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).

    If it fails: state was not saved, or was loaded into an optimizer that has none before its first
    step (https://github.com/huggingface/accelerate/pull/3904). The first loss depends on parameters
    only, the second on the optimizer too.
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
        yield from _texts(_state_changes(before, after, "save"))
    saved = _without_nonpersistent_buffers(cell, train, saved)
    loaded = _without_nonpersistent_buffers(cell, train, loaded)
    allowed_buffers = _buffers_of_ranks(saved)
    for before, after in pairs(saved, loaded):
        yield from _texts(_optimized_changes(before, after))
    if cell.option("save_only_model"):
        for before, after in pairs(saved, loaded):
            yield from _texts(_model_changes(before, after, "load", allowed_buffers))
        return
    for before, after in pairs(saved, loaded):
        yield from _texts(_state_changes(before, after, "load", allowed_buffers))
        if before.scaler != after.scaler:
            yield (
                f"rank {after.rank}: the gradient scaler is at {after.scaler}; "
                f"saved at {before.scaler}"
            )
        if before.scheduler != after.scheduler:
            yield (
                f"rank {after.rank}: scheduler is at {after.scheduler!r}; "
                f"saved at {before.scheduler!r}"
            )
    yield from _later_steps(
        cell, train, resumed, compares_groups=_same_groups_loaded(saved, loaded)
    )


def _texts(findings: Iterable[_Finding]) -> Iterator[str]:
    """Yield the text of each finding."""
    for finding in findings:
        yield str(finding)


def _first_infinite_losses(train: RunTrace) -> list[str]:
    """Return a finding for each rank with an infinite loss, in the first step that has any."""
    for nth in range(SAVED + 2):
        with_loss = []
        for snapshot in train.at("step", nth):
            # ``_loss_changes`` reports ranks without a loss.
            if snapshot.loss is not None:
                with_loss.append(snapshot)
        step = f"step {nth + 1}"
        infinite = list(finite_losses(with_loss, step))
        if infinite:
            # Losses of later steps are infinite because of it.
            return infinite
    return []


def _before_save(train: RunTrace) -> list[Snapshot]:
    """Return all ranks' snapshots of the steps before the save."""
    snapshots: list[Snapshot] = []
    for nth in range(SAVED):
        snapshots += train.at("step", nth)
    return snapshots


def _same_groups_loaded(saved: Snapshots, loaded: Snapshots) -> bool:
    """Tell whether each rank has loaded the numbers of param groups that it saved."""
    for before, after in pairs(saved, loaded):
        if list(_group_changes(before, after, "load")):
            return False
    return True


def _later_steps(
    cell: Cell, train: RunTrace, resumed: RunTrace, *, compares_groups: bool
) -> Iterator[str]:
    """Yield findings for the two steps after the load that differ from those after the save.

    Args:
        cell: The cell.
        train: The run that never stopped.
        resumed: The run that loaded its checkpoint.
        compares_groups: Whether to compare the numbers of param groups. If they differ after the
            load, they differ after every later step.
    """
    tolerance = _loss_tolerance(cell)
    for nth in (0, 1):
        name = f"step {nth + 1}"
        expected = train.at("step", SAVED + nth)
        steps = resumed.at("step", nth)
        yield from every_rank(expected, cell.world_size, f"{name} after the save")
        yield from every_rank(steps, cell.world_size, f"{name} after the load")
        if nth == 0:
            when = f"{name} after the load"
            for before, after in pairs(expected, steps):
                yield from other_mode(before, after, when, "in the run that never stopped")
        for text in _texts(_loss_changes(nth, expected, steps, tolerance)):
            yield f"{text}{tied_apart(cell, train)}"
        if compares_groups:
            changes = list(_later_group_changes(nth, expected, steps))
            yield from _texts(changes)
            compares_groups = not changes


def _loss_tolerance(cell: Cell) -> float:
    """Return how far losses of the same step of two runs may be apart, relative to their value."""
    if PRECISIONS.get(cell.precision).compute == "float32" or cell.world_size <= 2:
        return LOSS_TOLERANCE
    return ORDER_TOLERANCE


@dataclass(frozen=True)
class _Value:
    """The value of a tensor: its digest and its dtype."""

    digest: str
    dtype: str


#: The value of each tensor by its name.
_Tensors = Mapping[str, _Value]
#: The values that any rank has of each buffer, by its name.
_Buffers = Mapping[str, Collection[_Value]]


def _without_nonpersistent_buffers(cell: Cell, run: RunTrace, snapshots: Snapshots) -> Snapshots:
    """Return the snapshots without non-persistent buffers, which a new process computes anew."""
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


def _buffers_of_ranks(snapshots: Snapshots) -> _Buffers:
    """Return the values that any rank has of each buffer."""
    values: dict[str, set[_Value]] = defaultdict(set)
    for snapshot in snapshots:
        for info in snapshot.buffers:
            value = _Value(info.digest, info.dtype)
            values[info.name].add(value)
    return values


@dataclass(frozen=True)
class _Finding(abc.ABC):
    """What a rank has otherwise after an action than before; as text a message about it."""

    rank: int

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """Return the message without the rank."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


@dataclass(frozen=True)
class _TensorsChange(_Finding):
    """Tensors of one kind that changed in the same way.

    Attributes:
        kind: ``parameter``, ``buffer`` or ``optimizer state``.
        names: Their names.
        change: How they changed.
        action: The action that must not change them.
    """

    kind: str
    names: Collection[str]
    change: str
    action: str

    @property
    def text(self) -> str:
        tensors = f"{self.kind} {and_others(self.names)}"
        return f"{tensors}: {self.change} after the {self.action}"


@dataclass(frozen=True)
class _EmptyState(_Finding):
    """The optimizer has no state any more; before the action it had so many ``tensors``."""

    tensors: int
    action: str

    @property
    def text(self) -> str:
        expected = f"it held {self.tensors} tensors before"
        if self.action == "load":
            expected = f"{self.tensors} tensors were saved"
        return f"the optimizer's state is empty after the {self.action}; {expected}"


@dataclass(frozen=True)
class _GroupCountChange(_Finding):
    """The optimizer has another number of param groups."""

    before: int
    after: int
    action: str

    @property
    def text(self) -> str:
        groups = f"the optimizer has {self.after} param groups after the {self.action}"
        return f"{groups}; {self.before} before"


@dataclass(frozen=True)
class _GroupNumberChange(_Finding):
    """A number of a param group, such as its learning rate, is another one."""

    number: GroupNumber
    action: str

    @property
    def text(self) -> str:
        number = self.number
        values = f"{number.after} after the {self.action}; {number.before} before"
        return f"{_setting(number)} is {values}"


@dataclass(frozen=True)
class _LaterGroupNumber(_Finding):
    """A number of a param group is another one after step ``nth`` (from 0) of the resumed run."""

    number: GroupNumber
    nth: int

    @property
    def text(self) -> str:
        number = self.number
        expected = f"{number.before:.6g} in the run that never stopped"
        actual = f"{number.after:.6g} after step {self.nth + 1} of the resumed run"
        return f"{_setting(number)} is {actual}; {expected}"


def _setting(number: GroupNumber) -> str:
    """Return the words for a number of a param group in a finding."""
    return f"{number.key} of the optimizer's group {number.group}"


@dataclass(frozen=True)
class _StaleOptimizer(_Finding):
    """The optimizer updates tensors that are not in the model; ``problem`` is the text about it."""

    problem: str

    @property
    def text(self) -> str:
        return self.problem


@dataclass(frozen=True)
class _TrainableChange(_Finding):
    """Parameters were trainable before the load and are frozen; with ``trainable`` vice versa."""

    names: Collection[str]
    trainable: bool

    @property
    def text(self) -> str:
        change = "frozen after the load, and trained before"
        if self.trainable:
            change = "trainable after the load, and frozen before"
        names = and_others(self.names)
        return f"parameter {names}: {change}"


@dataclass(frozen=True)
class _MissingLoss(_Finding):
    """A rank has no loss to compare."""

    @property
    def text(self) -> str:
        return "no loss to compare; expected step() to return it"


@dataclass(frozen=True)
class _LossChange(_Finding):
    """The loss of a step after the load is another one; ``nth`` counts steps from 0."""

    nth: int
    before: float
    after: float

    @property
    def text(self) -> str:
        loss = f"loss {self.nth + 1} after the load is {self.after:.6g}"
        expected = f"{self.before:.6g} in the run that never stopped"
        return f"{loss}; {expected}"


# Comparisons: each yields the findings about one rank.


def _state_changes(
    before: Snapshot, after: Snapshot, action: str, buffers: _Buffers | None = None
) -> Iterator[_Finding]:
    """Yield findings for state that an action changed although it must not.

    Args:
        before: The snapshot before the action.
        after: The snapshot of the same rank after it.
        action: The action.
        buffers: Values that a buffer may have after the action, too.
    """
    yield from _model_changes(before, after, action, buffers or {})
    states = _optimizer_states(before)
    states_after = _optimizer_states(after)
    if states and not states_after:
        yield _EmptyState(after.rank, len(states), action)
        return
    for change, names in _tensor_changes(states, states_after).items():
        yield _TensorsChange(after.rank, "optimizer state", names, change, action)
    yield from _group_changes(before, after, action)


def _optimizer_states(snapshot: Snapshot) -> _Tensors:
    """Return the tensors of a rank's optimizer state."""
    states: dict[str, _Value] = {}
    for state in held_states(snapshot):
        name = f"{state.key} of {state.owner}"
        states[name] = _Value(state.digest, state.dtype)
    return states


def _model_changes(
    before: Snapshot, after: Snapshot, action: str, allowed_buffers: _Buffers
) -> Iterator[_TensorsChange]:
    """Yield findings for changed parameters, and for buffers with values that are not allowed."""
    parameters = _tensors(before.parameters)
    parameters_after = _tensors(after.parameters)
    for change, names in _tensor_changes(parameters, parameters_after).items():
        yield _TensorsChange(after.rank, "parameter", names, change, action)
    buffers = _tensors(before.buffers)
    buffers_after = _tensors(after.buffers)
    for name, value in buffers_after.items():
        allowed = allowed_buffers.get(name, ())
        if name in buffers and value in allowed:
            buffers_after[name] = buffers[name]
    for change, names in _tensor_changes(buffers, buffers_after).items():
        yield _TensorsChange(after.rank, "buffer", names, change, action)


def _tensors(infos: Iterable[ParameterInfo]) -> dict[str, _Value]:
    """Return the values of parameters or buffers."""
    tensors: dict[str, _Value] = {}
    for info in infos:
        tensors[info.name] = _Value(info.digest, info.dtype)
    return tensors


def _tensor_changes(before: _Tensors, after: _Tensors) -> dict[str, Collection[str]]:
    """Return the names of the tensors that changed, by the words for how; only ways with any."""
    other_values: list[str] = []
    other_dtypes: list[str] = []
    for name in before.keys() & after.keys():
        value = before[name]
        value_after = after[name]
        if value.digest != value_after.digest:
            other_values.append(name)
        if not same_dtype(value.dtype, value_after.dtype):
            other_dtypes.append(name)
    names_by_change: dict[str, Collection[str]] = {
        "missing": before.keys() - after.keys(),
        "new": after.keys() - before.keys(),
        "other values": other_values,
        "another dtype": other_dtypes,
    }
    return {change: names for change, names in names_by_change.items() if names}


def _optimized_changes(before: Snapshot, after: Snapshot) -> Iterator[_Finding]:
    """Yield findings unless the optimizer updates the same parameters after the load.

    At a small learning rate the two losses after the load would not show it.
    """
    optimizer = before.optimizer
    optimizer_after = after.optimizer
    if optimizer and optimizer_after and optimizer_after.foreign > optimizer.foreign:
        yield _StaleOptimizer(after.rank, stale(optimizer_after, " after the load"))
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
        yield _TrainableChange(after.rank, frozen, trainable=False)
    if thawed:
        yield _TrainableChange(after.rank, thawed, trainable=True)


def _group_changes(before: Snapshot, after: Snapshot, action: str) -> Iterator[_Finding]:
    """Yield findings for another number of param groups, and for other numbers in them."""
    groups = before.param_groups
    groups_after = after.param_groups
    count = len(groups)
    count_after = len(groups_after)
    if count != count_after:
        yield _GroupCountChange(after.rank, count, count_after, action)
    for number in unlike(groups, groups_after):
        yield _GroupNumberChange(after.rank, number, action)


def _loss_changes(
    nth: int, expected: Snapshots, resumed: Snapshots, tolerance: float
) -> Iterator[_Finding]:
    """Yield findings for losses of a step after the load that differ by more than the tolerance."""
    for before, after in pairs(expected, resumed):
        if before.loss is None or after.loss is None:
            yield _MissingLoss(after.rank)
        elif not math.isfinite(before.loss):
            # ``_first_infinite_losses`` reports it.
            continue
        elif not math.isclose(before.loss, after.loss, rel_tol=tolerance):
            yield _LossChange(after.rank, nth, before.loss, after.loss)


def _later_group_changes(
    nth: int, expected: Snapshots, resumed: Snapshots
) -> Iterator[_LaterGroupNumber]:
    """Yield findings for numbers of param groups after a step, which no later loss may show."""
    for before, after in pairs(expected, resumed):
        for number in unlike(before.param_groups, after.param_groups, RATE_TOLERANCE):
            if number.before is not None and number.after is not None:
                yield _LaterGroupNumber(after.rank, number, nth)


def _later_rate_changes(
    nth: int, expected: Snapshots, resumed: Snapshots
) -> Iterator[_LaterGroupNumber]:
    """Yield findings for learning rates after a step, as ``_later_group_changes`` does."""
    for change in _later_group_changes(nth, expected, resumed):
        if change.number.key == "lr":
            yield change


@check(scenario=TRAIN, until=(("train", "save", 0), ("train", "exported", 0)), order=9)
def observers(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that neither saving a checkpoint nor exporting the weights changes what is trained.

    Parameters, buffers, optimizer, scheduler, scaler and torch's random state stay equal bit by
    bit, and the step after a save has the same modules in training mode as that before it.

    If it fails: look for a step of the optimizer that creates state to save, for weights that are
    cast or moved in place, for what draws random numbers, and for an evaluation without
    ``model.train()`` after it.
    """
    train = trace.run("train")
    trained = train.at("step", SAVED - 1)
    trained_further = train.at("step", SAVED)
    for before, after in pairs(trained, trained_further):
        yield from other_mode(before, after, "the step after the save", "before it")
    yield from _observed(cell, trained, train.at("save"), "save")
    before_export = train.at("export")
    yield from _observed(cell, before_export, train.at("exported"), "export")


@check(
    scenario=resume_runs,
    until=(("train", "step", 5), ("resume", "step", 2)),
    order=9,
    not_applicable=not_evaluated,
    depends_on=RESUMED,
)
def midway(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that an evaluation between two steps changes nothing of the training.

    Parameters, buffers, optimizer, scheduler, scaler and torch's random state stay equal bit by
    bit. The step after it has the same modules in training mode as that before it, and the loss of
    the run that never evaluated. A resumed run evaluates, by the driver's call ``evaluate()``; if
    its steps before are wrong, which ``resume`` reports, no loss is compared. The learning rate is
    that of the run that never stopped; one that was another already before the evaluation is the
    only finding about later steps. A buffer that each rank fills from its own data may become that
    of another rank, as DDP sends those of rank 0 before each forward pass.

    If it fails: call ``model.train()`` after it; look for what draws random numbers, such as the
    seed of a new iterator of a loader; for parameters that stay gathered or cast; for a count of
    batches or steps that goes on.
    """
    train = trace.run("train")
    evaluating = trace.run("resume")
    before = evaluating.at("step", 1)
    after = evaluating.at("step", 2)
    yield from every_rank(after, cell.world_size, "the step after the evaluation")
    evaluated = evaluating.at(EVALUATE)
    yield from _observed(cell, before, evaluated, "evaluation", _buffers_of_ranks(before))
    for snapshot, following in pairs(before, after):
        yield from other_mode(snapshot, following, "the step after the evaluation", "before it")
    tolerance = _loss_tolerance(cell)
    for nth in (0, 1):
        steps = evaluating.at("step", nth)
        expected_steps = train.at("step", SAVED + nth)
        if any(_loss_changes(nth, expected_steps, steps, tolerance)):
            return
        changes = list(_later_rate_changes(nth, expected_steps, steps))
        if changes:
            # With another rate the loss is another one, whatever the evaluation does.
            yield from _texts(changes)
            return
    expected_steps = train.at("step", SAVED + 2)
    for expected, found in pairs(expected_steps, after):
        if expected.loss is None or found.loss is None:
            continue
        if not math.isclose(expected.loss, found.loss, rel_tol=tolerance):
            yield str(_LossAfterEvaluation(found.rank, expected.loss, found.loss))
    yield from _texts(_later_rate_changes(2, expected_steps, after))


def _ends_with_last_step(cell: Cell, driver: type[Driver]) -> str | None:
    if not driver.loads_best(cell):
        return "training ends with the weights of its last step: loads_best() of the driver"
    if not driver.can("export"):
        return "the weights are read before an export, and the driver has none"
    return None


@check(
    scenario=TRAIN,
    until=(("train", "save", 0), ("train", "export", 0)),
    order=10,
    not_applicable=_ends_with_last_step,
    depends_on=RESUMED,
)
def best(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a training which is to end with its best checkpoint has its weights then.

    Parameters and buffers are bit by bit those of the only checkpoint of the run ``train``, 17
    steps before its end.

    If it fails: the checkpoint was not found, which trainers only warn of; its weights were loaded
    into a model that is not the wrapped one, or under names that it does not have.
    """
    train = trace.run("train")
    saved = _without_nonpersistent_buffers(cell, train, train.at("save"))
    ended = _without_nonpersistent_buffers(cell, train, train.at("export"))
    yield from every_rank(ended, cell.world_size, "the end of the training")
    for before, after in pairs(saved, ended):
        changes = _model_changes(before, after, "end of the training", _buffers_of_ranks(saved))
        yield from _texts(changes)


@dataclass(frozen=True)
class _LossAfterEvaluation:
    """The loss of the step after an evaluation is not that of the run that never evaluated."""

    rank: int
    expected: float
    found: float

    def __str__(self) -> str:
        loss = f"the loss of the step after the evaluation is {self.found:.6g}"
        return f"rank {self.rank}: {loss}; {self.expected:.6g} in the run that never evaluated"


def _observed(
    cell: Cell,
    before_action: Snapshots,
    after_action: Snapshots,
    action: str,
    buffers: _Buffers | None = None,
) -> Iterator[str]:
    """Yield findings for what an action changed that must only read.

    Args:
        cell: The cell.
        before_action: The snapshots of all ranks before the action.
        after_action: Those after it.
        action: The action.
        buffers: Values that a buffer may have after the action, too.
    """
    yield from every_rank(after_action, cell.world_size, action)
    for before, after in pairs(before_action, after_action):
        # Without an export() of the driver there is no model in these snapshots.
        if before.model is None or after.model is None:
            continue
        yield from _texts(_state_changes(before, after, action, buffers))
        another = f"is another after the {action}"
        if before.scheduler != after.scheduler:
            yield f"rank {after.rank}: the scheduler {another}"
        if before.scaler != after.scaler:
            yield f"rank {after.rank}: the gradient scaler {another}"
        if before.rng != after.rng:
            yield f"rank {after.rank}: the random state {another}"
        if trainable_names(before.parameters) != trainable_names(after.parameters):
            yield f"rank {after.rank}: the set of trainable parameters {another}"
