"""What must be equal bit by bit after a call of a walk, and what is not.

A *walk* makes the same sequence of calls, such as ``step(), save(), evaluate()``, on a live trainer
under FSDP, say, and on a *reference*: one process with the bare model. ``claim`` compares them
after each call, by these functions:

- ``changes``: a call that only reads, such as ``evaluate``, must change nothing at all;
- ``structure_changes``: no call may change names, shapes, dtypes or shards of parameters;
- ``reference_differences``: what is trainable, learning rates, buffers and modes are those of the
  reference.

The input is *snapshots*: what was recorded in one rank (process) after the call. A tensor is
recorded by its digest, a hash of the part that the rank stores. The result is findings as text.
``inexact`` compares the numbers that rounding may change.

A parameter has a *live name* in the trainer, such as ``module.layer.weight``, and another one in
the *unwrapped* model, before DDP or FSDP wraps it: ``layer.weight``. ``Names`` maps the first to
the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from pytest_distcompat.calls import Call
from pytest_distcompat.checks import Names
from pytest_distcompat.ext.walk.difference_text import (
    Values,
    differing,
    first_difference,
    unlike_reference,
)
from pytest_distcompat.trace import CallInfo, ParameterInfo, Snapshot

#: The calls that change no bit of what is trained, though drivers declare them as training: they
#: only skip data.
_QUIET = frozenset({"skip", "new_epoch"})
#: Fields of a snapshot that a call which changes nothing leaves as they are, besides parameters,
#: buffers and gradients.
_UNCHANGED_FIELDS = ("optimizer", "scheduler", "rng", "scaler")


def must_change_nothing(call: Call, snapshot: Snapshot) -> bool:
    """Tell whether the call leaves the trainer as it is, bit by bit."""
    if call.name in _QUIET:
        return True
    return snapshot.call is not None and snapshot.call.observes


def changes(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what changed, bit by bit, in a call that must change nothing.

    Args:
        before: The snapshot of a rank before the call.
        after: The snapshot of the same rank after it.
    """
    before, after = _without_step_records(before, after)
    for name in _UNCHANGED_FIELDS:
        old = getattr(before, name)
        new = getattr(after, name)
        if old != new:
            # ``first_difference`` returns a text such as ``: 3; expected 2``.
            yield f"the {name} changed{first_difference(old, new)}"
    parameters = _by_name(before.parameters)
    yield from differing("parameters changed", parameters, _by_name(after.parameters))
    buffers = _by_name(before.buffers)
    yield from differing("buffers changed", buffers, _by_name(after.buffers))
    if before.call and after.call:
        yield from _changes_of_gradients_and_modes(before.call, after.call)


def _changes_of_gradients_and_modes(before: CallInfo, after: CallInfo) -> Iterator[str]:
    """Yield the gradients that a call changed, and how many modules are in evaluation mode."""
    gradients_after = _values_of(before.gradients, after.gradients)
    yield from differing("gradients changed", before.gradients, gradients_after)
    if before.evaluating != after.evaluating:
        evaluating = f"{len(after.evaluating)} modules are in evaluation mode"
        yield f"{evaluating}; {len(before.evaluating)} were"


def _without_step_records(before: Snapshot, after: Snapshot) -> tuple[Snapshot, Snapshot]:
    """Return both snapshots without the fields of the optimizer that only steps define."""
    if before.optimizer is None or after.optimizer is None:
        return before, after
    # Which parameters had no gradient is known of steps only.
    old = dataclasses.replace(before.optimizer, without_gradient=())
    new = dataclasses.replace(after.optimizer, without_gradient=())
    if not old.states:
        # A fresh optimizer may get its state from a call that only reads it. Whether that is right
        # shows in the next step, which is compared.
        new = dataclasses.replace(new, states=())
    return dataclasses.replace(before, optimizer=old), dataclasses.replace(after, optimizer=new)


def _by_name(infos: Iterable[ParameterInfo]) -> dict[str, ParameterInfo]:
    """Return parameters or buffers by their live name."""
    return {info.name: info for info in infos}


def structure_changes(built: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield how parameters differ from those that were built: names, shapes, dtypes, shards.

    ``built`` is the snapshot of the same rank after the trainer was built.
    """
    yield from differing("parameters are not as built", _structure(built), _structure(after))


def _structure(snapshot: Snapshot) -> dict[str, Any]:
    """Return, by live name, what a call must never change of a parameter."""
    structure: dict[str, Any] = {}
    for info in snapshot.parameters:
        structure[info.name] = (
            info.kind,
            info.shape,
            info.dtype,
            info.layout,
            info.local_numel,
        )
    return structure


def reference_differences(names: Names, snapshot: Snapshot, reference: Snapshot) -> Iterator[str]:
    """Yield what differs from the reference, where it must be exactly equal.

    Compared are what is trainable, what is in the optimizer, learning rates, buffers and modes.

    Args:
        names: Maps live names to those of the unwrapped model, which the reference has.
        snapshot: The snapshot of one rank after the call.
        reference: The snapshot of the reference after the same call.
    """
    yield from _parameter_differences(names, snapshot, reference)
    if snapshot.optimizer and reference.optimizer:
        rates = _learning_rates(snapshot)
        expected_rates = _learning_rates(reference)
        if rates != expected_rates:
            yield unlike_reference(f"the learning rates are {rates}", expected_rates)
    reference_buffers = _digests(names, reference.buffers)
    buffers = _digests(names, snapshot.buffers)
    expected_buffers = _values_of(buffers, reference_buffers)
    yield from differing("buffers are not the reference's", expected_buffers, buffers)
    if snapshot.call and reference.call:
        evaluating = len(snapshot.call.evaluating)
        expected_evaluating = len(reference.call.evaluating)
        # Wrappers add modules, so only whether there are any is compared, not how many.
        if bool(evaluating) != bool(expected_evaluating):
            count = f"{evaluating} modules are in evaluation mode"
            yield unlike_reference(count, str(expected_evaluating))


def _digests(names: Names, infos: Iterable[ParameterInfo]) -> dict[str, str]:
    """Return the digests of tensors, by unwrapped name."""
    digests: dict[str, str] = {}
    for info in infos:
        digests[names(info.name)] = info.digest
    return digests


def _parameter_differences(names: Names, snapshot: Snapshot, reference: Snapshot) -> Iterator[str]:
    """Yield the parameters that are not trainable, or not in the optimizer, as in the reference."""
    expected_by_name = _by_name(reference.parameters)
    live: dict[str, ParameterInfo] = {}
    for info in snapshot.parameters:
        # A FlatParameter of FSDP1 is several parameters of the model in one: it has no name there.
        if info.kind != "FlatParameter":
            live[names(info.name)] = info
    trainable: dict[str, bool] = {}
    expected_trainable: dict[str, bool | None] = {}
    entries: dict[str, int] = {}
    expected_entries: dict[str, int | None] = {}
    for name, info in live.items():
        trainable[name] = info.trainable
        expected = expected_by_name.get(name)
        if expected is None:
            # The reference has no such parameter: a finding.
            expected_trainable[name] = None
            continue
        expected_trainable[name] = expected.trainable
        # ``held`` is how often the parameter is in the optimizer. ZeRO's optimizers hold flat
        # copies instead of parameters: then it is None.
        if info.held is not None:
            entries[name] = info.held
            expected_entries[name] = expected.held
    yield from differing("not trainable as in the reference", expected_trainable, trainable)
    yield from differing("not in the optimizer as in the reference", expected_entries, entries)


def _learning_rates(snapshot: Snapshot) -> str:
    """Return the different learning rates of the optimizer's groups, as findings show them."""
    rates: set[str] = set()
    for group in snapshot.param_groups:
        rate = group.get("lr", 0)
        rates.add(f"{rate:.6g}")
    return ", ".join(sorted(rates))


def _values_of(names: Iterable[str], values: Values) -> Values:
    """Return the values of these names only, None for a name without one."""
    return {name: values.get(name) for name in names}
