"""Findings about what an action changed: differences between two snapshots of one rank.

A *snapshot* is what one rank recorded of its part of model and optimizer after one action, such as
``save`` or ``load``. Tensors are compared by digests, which are hashes of the values that the rank
holds, so nothing is gathered.

The checks of ``checks.resume`` call these functions with a snapshot before and one after an action,
for example at the save and after the load of another process group. Each yields objects of
``Finding``, whose text is such as ``rank 1: parameter 'lm_head.weight': other values after the
load``; none if all is equal.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pytest_distcompat.checks._base import stale
from pytest_distcompat.model_values import GroupNumber, held_states, same_dtype, unlike
from pytest_distcompat.trace import ParameterInfo, Snapshot
from pytest_distcompat.wording import and_others


@dataclass(frozen=True)
class Value:
    """The value of a tensor."""

    #: A hash of the values that this rank holds.
    digest: str
    #: torch's name without the prefix: ``float32``.
    dtype: str


#: Name -> value of a tensor: of a parameter, a buffer, or optimizer state (``exp_avg of lm_head``).
Tensors = Mapping[str, Value]
#: Name of a buffer -> the values that it may have after an action: those that any rank had before.
#: DDP, for example, sends the buffers of rank 0 to all ranks.
Buffers = Mapping[str, Collection[Value]]


@dataclass(frozen=True)
class Finding(abc.ABC):
    """A difference between two snapshots of one rank. ``str`` gives the finding's text."""

    #: The rank of the two snapshots.
    rank: int

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """Return the message without the rank."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


@dataclass(frozen=True)
class _TensorsChange(Finding):
    """Tensors of one kind that changed in the same way.

    Attributes:
        kind: ``parameter``, ``buffer`` or ``optimizer state``.
        names: Their names.
        change: How they changed: ``missing``, ``new``, ``other values`` or ``another dtype``.
        action: The action that must not change them: ``save``, ``load``, ``export``.
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
class _EmptyState(Finding):
    """The optimizer has no state after an action; before it had state of ``tensors`` tensors."""

    tensors: int
    action: str

    @property
    def text(self) -> str:
        expected = f"it held {self.tensors} tensors before"
        if self.action == "load":
            expected = f"{self.tensors} tensors were saved"
        return f"the optimizer's state is empty after the {self.action}; {expected}"


@dataclass(frozen=True)
class _GroupCountChange(Finding):
    """The optimizer has ``after`` param groups after an action, and had ``before`` before it."""

    before: int
    after: int
    action: str

    @property
    def text(self) -> str:
        groups = f"the optimizer has {self.after} param groups after the {self.action}"
        return f"{groups}; {self.before} before"


@dataclass(frozen=True)
class _GroupNumberChange(Finding):
    """An action changed a number of a param group, such as its learning rate."""

    number: GroupNumber
    action: str

    @property
    def text(self) -> str:
        number = self.number
        values = f"{number.after} after the {self.action}; {number.before} before"
        return f"{number_in_words(number)} is {values}"


def number_in_words(number: GroupNumber) -> str:
    """Return the words for a number of a param group in a finding."""
    return f"{number.key} of the optimizer's group {number.group}"


@dataclass(frozen=True)
class _StaleOptimizer(Finding):
    """The optimizer updates tensors that are not in the model.

    ``problem`` is the text of ``stale``: ``2 of 9 tensors in the optimizer are no parameters ...``.
    """

    problem: str

    @property
    def text(self) -> str:
        return self.problem


@dataclass(frozen=True)
class _TrainableChange(Finding):
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


def state_changes(
    before: Snapshot, after: Snapshot, action: str, buffers: Buffers | None = None
) -> Iterator[Finding]:
    """Yield findings for state that an action changed although it must not.

    Args:
        before: The snapshot before the action.
        after: The snapshot of the same rank after it.
        action: The action.
        buffers: Values that a buffer may have after the action besides its own. None if each buffer
            must keep its value.
    """
    yield from model_changes(before, after, action, buffers or {})
    states = _optimizer_states(before)
    states_after = _optimizer_states(after)
    # One finding says it better than each tensor as missing. The numbers of param groups are not
    # compared then: an optimizer without its state is wrong whatever they are.
    if states and not states_after:
        yield _EmptyState(after.rank, len(states), action)
        return
    for change, names in _tensor_changes(states, states_after).items():
        yield _TensorsChange(after.rank, "optimizer state", names, change, action)
    yield from group_changes(before, after, action)


def _optimizer_states(snapshot: Snapshot) -> Tensors:
    """Return the tensors of a rank's optimizer state, by names such as ``exp_avg of lm_head``."""
    states: dict[str, Value] = {}
    # ``held_states`` leaves out the states of parameters of which the rank holds no element. The
    # owner of a state is the name of its parameter.
    for state in held_states(snapshot):
        name = f"{state.key} of {state.owner}"
        states[name] = Value(state.digest, state.dtype)
    return states


def model_changes(
    before: Snapshot, after: Snapshot, action: str, allowed_buffers: Buffers
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
        # An allowed value counts as unchanged.
        if name in buffers and value in allowed:
            buffers_after[name] = buffers[name]
    for change, names in _tensor_changes(buffers, buffers_after).items():
        yield _TensorsChange(after.rank, "buffer", names, change, action)


def _tensors(infos: Iterable[ParameterInfo]) -> dict[str, Value]:
    """Return name -> value of parameters or buffers."""
    tensors: dict[str, Value] = {}
    for info in infos:
        tensors[info.name] = Value(info.digest, info.dtype)
    return tensors


def _tensor_changes(before: Tensors, after: Tensors) -> dict[str, Collection[str]]:
    """Return the kinds of changes, each with the names of the tensors that changed so.

    For example ``{"missing": {"norm.weight"}, "other values": ["embed.weight"]}``. The kinds are
    ``missing``, ``new``, ``other values`` and ``another dtype``; one without tensors is left out.
    """
    other_values: list[str] = []
    other_dtypes: list[str] = []
    for name in before.keys() & after.keys():
        value = before[name]
        value_after = after[name]
        if value.digest != value_after.digest:
            other_values.append(name)
        # The type of a Python number (``int``, ``float``) equals any dtype, because a saved number
        # may come back as a tensor.
        if not same_dtype(value.dtype, value_after.dtype):
            other_dtypes.append(name)
    names_by_change: dict[str, Collection[str]] = {
        "missing": before.keys() - after.keys(),
        "new": after.keys() - before.keys(),
        "other values": other_values,
        "another dtype": other_dtypes,
    }
    return {change: names for change, names in names_by_change.items() if names}


def optimized_changes(before: Snapshot, after: Snapshot) -> Iterator[Finding]:
    """Yield findings unless the optimizer updates the same parameters after the load.

    At a small learning rate the two losses after the load would not show it.
    """
    optimizer = before.optimizer
    optimizer_after = after.optimizer
    # ``foreign`` is how many tensors in the optimizer are no parameters of the live model.
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


def group_changes(before: Snapshot, after: Snapshot, action: str) -> Iterator[Finding]:
    """Yield findings for another number of param groups, and for other numbers in them."""
    groups = before.param_groups
    groups_after = after.param_groups
    count = len(groups)
    count_after = len(groups_after)
    if count != count_after:
        yield _GroupCountChange(after.rank, count, count_after, action)
    # Each number that differs: learning rate, weight decay, betas.
    for number in unlike(groups, groups_after):
        yield _GroupNumberChange(after.rank, number, action)
