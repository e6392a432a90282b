"""The quantities of a training step that ``resume_roundtrip`` compares: read, compare, describe.

``resume_roundtrip`` is the function by which a user's test stops a script and resumes it. Its
``RoundTrip`` (module ``roundtrip``) has two runs of the script: one that never stopped, and one
that loaded a checkpoint. For each rank and step it takes the snapshot of either run (what the probe
in the rank recorded after that step) and asks ``are_equal("losses", expected, resumed, ...)`` here.
If the answer is no, ``describe_difference`` says in words how they differ, such as ``2.31 instead
of 2.29``.

A quantity is one of the names in ``SAME``: ``losses``, ``grad_norms``, ``parameters``,
``optimizer``, ``scheduler``, ``rng``, ``data`` and ``extra_state``.

Tensors are never compared themselves. A snapshot has a digest of each: a hash of the part of the
tensor that its rank stores. Equal digests mean equal values, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.trace import Snapshot


@dataclass(frozen=True)
class _StoredValue:
    """A tensor as one rank stores it."""

    #: The digest of the values that this rank stores.
    digest: str
    #: Such as ``"float32"``. Empty for a single number, such as Adam's ``step``: a load may make a
    #: tensor of a Python number, and that is no difference.
    dtype: str


@dataclass(frozen=True)
class _OptimizerValues:
    """One rank's optimizer."""

    #: ``"exp_avg of layer.weight"`` -> the optimizer's state tensor of that parameter. Also this
    #: rank's parts of the float32 masters of ZeRO: the weights that the optimizer really updates.
    states: Mapping[str, _StoredValue]
    #: The numbers of each param group, such as ``{"lr": 0.001, "weight_decay": 0.0}``.
    param_groups: tuple[Mapping[str, float], ...]


def _losses(snapshot: Snapshot) -> tuple[float | None, ...]:
    """Return the loss of the step as a tuple of one; in it None if ``backward`` got no loss."""
    return (snapshot.loss,)


def _grad_norms(snapshot: Snapshot) -> tuple[float, ...]:
    """Return this rank's share of the gradient norm, for each optimizer that stepped."""
    return tuple(math.sqrt(step.square) for step in snapshot.steps)


def _parameters(snapshot: Snapshot) -> dict[str, _StoredValue]:
    """Return the parameters and buffers by their name in the live model."""
    stored: dict[str, _StoredValue] = {}
    for info in (*snapshot.parameters, *snapshot.buffers):
        stored[info.name] = _StoredValue(info.digest, info.dtype)
    return stored


def _optimizer(snapshot: Snapshot) -> _OptimizerValues:
    """Return this rank's optimizer state, masters and numbers of param groups."""
    states: dict[str, _StoredValue] = {}
    for info in (*snapshot.states, *snapshot.masters):
        # A load may return a single number as a tensor, whose dtype says nothing.
        dtype = "" if info.numel == 1 else info.dtype
        name = f"{info.key} of {info.owner}"
        states[name] = _StoredValue(info.digest, dtype)
    return _OptimizerValues(states, snapshot.param_groups)


def _extra_state(snapshot: Snapshot) -> dict[str, Mapping[str, str]]:
    """Return the values of each extra state that a checkpoint is to bring back.

    Extra state is a variable of the script with state beside model and optimizer, such as ``ema``.
    The result maps its name to the text or digest of each value in it:
    ``{"ema": {"shadow.weight": "32:1f...", "step": "3"}}``.
    """
    # The user may declare that a checkpoint leaves one out: ``expected.comes_back`` is then False.
    return {info.name: info.values for info in snapshot.extra if info.expected.comes_back}


#: Quantity -> how it is read from the snapshot of one rank after one step.
_READERS: Mapping[str, Callable[[Snapshot], Any]] = {
    "losses": _losses,
    "grad_norms": _grad_norms,
    "parameters": _parameters,
    "optimizer": _optimizer,
    # A text with the learning rates and a digest of the scheduler's state.
    "scheduler": lambda snapshot: snapshot.scheduler,
    # A digest of torch's random states.
    "rng": lambda snapshot: snapshot.rng,
    # The digests of the model's inputs, one for each forward of the step.
    "data": lambda snapshot: snapshot.inputs,
    "extra_state": _extra_state,
}
#: The quantities that can be compared, step by step and rank by rank.
SAME = tuple(_READERS)
#: Input data and random states are causes: all else of a step follows from them.
_CAUSES = ("data", "rng")
#: The order in which differences of one step are reported.
CAUSES_FIRST = (*_CAUSES, *(quantity for quantity in SAME if quantity not in _CAUSES))
#: Relative tolerance of losses and gradient norms on a GPU, where the order of sums is not fixed.
TOLERANCE = 1e-4
#: Quantities that are compared bit by bit, and on the CPU only.
_EXACT = ("parameters", "optimizer", "rng", "extra_state")


def are_equal(quantity: str, expected: Snapshot, actual: Snapshot, *, on_cpu: bool) -> bool:
    """Tell whether a quantity of one rank in one step is equal in two runs.

    On the CPU everything must be equal bit by bit. On a GPU the last digits differ from run to
    run: losses and gradient norms have a tolerance there, and what is known only by its digest is
    not compared.
    """
    before = _READERS[quantity](expected)
    after = _READERS[quantity](actual)
    if quantity == "extra_state":
        # A script whose function has returned has no variables in its last step.
        before, after = _common(before, after), _common(after, before)
    if on_cpu or quantity in {"scheduler", "data"}:
        return bool(before == after)
    if quantity in _EXACT:
        # On a GPU they are not compared.
        return True
    if len(before) != len(after):
        return False
    for number, other in zip(before, after, strict=True):
        # A step without a loss, or without gradients, has None.
        if number is None or other is None:
            if number is not other:
                return False
            continue
        if not math.isclose(number, other, rel_tol=TOLERANCE):
            return False
    return True


def describe_difference(quantity: str, expected: Snapshot, resumed: Snapshot) -> str:
    """Describe how a quantity differs: by both values if they are short, else by the first name.

    For example ``2.31 instead of 2.29``, or ``3 of 12 values differ, first 'layer.weight',``.
    """
    before = _READERS[quantity](expected)
    after = _READERS[quantity](resumed)
    if quantity in {"losses", "grad_norms"}:
        return f"{_numbers(after)} instead of {_numbers(before)}"
    if quantity == "parameters":
        return _differing_values(before, after)
    if quantity == "optimizer":
        return _differing_optimizers(before, after)
    if quantity == "scheduler":
        return f"{after!r} instead of {before!r}"
    if quantity == "extra_state":
        names = [name for name in before if name in after and before[name] != after[name]]
        return f"{', '.join(names)} differs"
    # Of these two a snapshot has only digests, which would tell a reader nothing.
    return {"rng": "another random state", "data": "fed other data"}[quantity]


def _common(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names the others have too."""
    return {name: value for name, value in values.items() if name in others}


def _differing_optimizers(before: _OptimizerValues, after: _OptimizerValues) -> str:
    """Describe how two optimizers differ: in their state, else in the numbers of their groups."""
    if before.states != after.states:
        return _differing_values(before.states, after.states)
    return f"groups are {after.param_groups} instead of {before.param_groups}"


def _differing_values(before: Mapping[str, _StoredValue], after: Mapping[str, _StoredValue]) -> str:
    """Describe in how many tensors two runs differ.

    The first of these is named, with its dtypes if they differ. At least one tensor must differ.
    """
    differing = []
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            differing.append(name)
    first = differing[0]
    # Stands for a tensor that only one of the runs has.
    missing = _StoredValue(digest="", dtype="nothing")
    dtype_before = before.get(first, missing).dtype
    dtype_after = after.get(first, missing).dtype
    stored = ""
    if dtype_before != dtype_after:
        stored = f" ({dtype_after} instead of {dtype_before})"
    counted = f"{len(differing)} of {len(before)} values differ"
    return f"{counted}, first {first!r}{stored},"


def _numbers(values: Sequence[float | None]) -> str:
    """Return the numbers as text, such as ``2.3127644, 2.3011818``; ``none`` for a missing one."""
    if not values:
        return "none"
    texts: list[str] = []
    for value in values:
        if value is None:
            texts.append("none")
        else:
            texts.append(f"{value:.8g}")
    return ", ".join(texts)
