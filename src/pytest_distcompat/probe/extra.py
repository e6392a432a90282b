"""Reader of state beside model and optimizer, which a driver names in ``extra_state``.

A trainer may depend on more than model, optimizer and scheduler: an average of the weights, a
curriculum, a generator of random numbers. A driver (the class that presents a trainer to this
package) declares it as ``extra_state = {"trainer.ema": ExtraState()}``. ``worker`` then calls
``read_extra_state`` on each rank after an action, and ``ext.scripts`` for variables of a script.
The check ``extra_state`` compares the values between ranks, and before and after a checkpoint.

The state is taken apart into single values. An average of one layer becomes
``{"state_dict.weight": "32:1f...", "state_dict.decay": "0.99"}``: digests of tensors, and texts of
numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_distcompat.probe.layouts import layout_of
from pytest_distcompat.probe.tensors import digest, square_of
from pytest_distcompat.trace import ExtraState, ExtraStateInfo

#: Types whose values are compared by their text.
_PLAIN = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True)
class _Value:
    """One value inside a state.

    Attributes:
        place: Where it is in the state: ``shadow.inlet.weight``.
        text: The value, or a digest of it.
        exact: Whether it is the same in whatever order it is computed; a number with a fraction
            may be rounded in another way. Where the check compares two trainings, it leaves out
            what is not exact.
        fractions: The tensor, if it is of a floating dtype; None for anything else.
    """

    place: str
    text: str
    exact: bool = True
    fractions: torch.Tensor | None = None


def read_extra_state(driver: Any, states: Mapping[str, ExtraState]) -> tuple[ExtraStateInfo, ...]:
    """Return the values of the state that a driver names in ``extra_state``.

    Args:
        driver: The driver.
        states: The names of its attributes, which may have dots, and what is expected of each.

    Raises:
        TypeError: If the driver has no such attribute, or an attribute has values that cannot be
            compared.
    """
    infos: list[ExtraStateInfo] = []
    for name, expected in states.items():
        exact: dict[str, str] = {}
        rounded: dict[str, str] = {}
        squares: dict[str, float] = {}
        for value in _values(_attribute(driver, name), "", name):
            if value.exact:
                exact[value.place] = value.text
            else:
                rounded[value.place] = value.text
            # If the reference (the same training in one process) has the state too, sums of squares
            # are compared with its own: those of shards add up to that of the whole tensor.
            if expected.in_reference and value.fractions is not None:
                squares[value.place] = square_of(value.fractions)
        info = ExtraStateInfo(
            name=name, expected=expected, exact=exact, rounded=rounded, squares=squares
        )
        infos.append(info)
    return tuple(infos)


def _attribute(driver: Any, name: str) -> Any:
    """Return the attribute of that name, ``trainer.ema`` for example."""
    value = driver
    for part in name.split("."):
        if not hasattr(value, part):
            raise TypeError(
                f"extra_state names {name!r}, and {type(value).__name__} has no attribute {part!r}"
            )
        value = getattr(value, part)
    return value


def _values(value: Any, place: str, name: str) -> Iterator[_Value]:
    """Yield each value inside ``value``, taken apart as far as needed.

    Args:
        value: The state, or a part of it.
        place: Where the part is in the state: ``shadow.inlet``; empty for the state itself.
        name: The name of the state, for an error: ``trainer.ema``.
    """
    if isinstance(value, _PLAIN):
        is_exact = not isinstance(value, float)
        yield _Value(place, repr(value), is_exact)
    elif isinstance(value, torch.Tensor):
        # Which part of the tensor this rank has: ``(("Shard(0)", 2, 1),)`` for the second of two
        # shards, empty for a whole tensor. It is added to the place, so that different parts are
        # not compared with each other.
        region = layout_of(value).region
        if region:
            place = f"{place} {region}"
        if value.is_floating_point():
            yield _Value(place, digest(value), exact=False, fractions=value)
        else:
            yield _Value(place, digest(value))
    else:
        for key, part in _parts(value, name):
            part_place = f"{place}.{key}".lstrip(".")
            yield from _values(part, part_place, name)


def _parts(value: Any, name: str) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a value that has several, each with its key: ``("decay", 0.99)``.

    Raises:
        TypeError: If there is no known way to take the value apart.
    """
    if isinstance(value, torch.nn.Module):
        # Not its state dict, which wrappers gather in a collective.
        return [*value.named_parameters(), *value.named_buffers()]
    # ``random.Random`` has ``getstate``, ``torch.Generator`` has ``get_state``.
    for method in ("state_dict", "getstate", "get_state"):
        if callable(getattr(value, method, None)):
            return [(method, getattr(value, method)())]
    if isinstance(value, Mapping):
        return sorted(value.items(), key=lambda item: str(item[0]))
    if isinstance(value, (set, frozenset)):
        # A set has another order in each process.
        value = sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if callable(getattr(value, "tobytes", None)):
        # An array of numpy, or a number of it.
        hasher = hashlib.sha256(value.tobytes())
        return [("bytes", hasher.hexdigest()[:16])]
    expected = (
        "expected a tensor, a module, a number, text, a collection of them, "
        "or an object with state_dict()"
    )
    type_name = type(value).__name__
    raise TypeError(f"extra_state {name!r} has a {type_name}: {value!r:.100}; {expected}")
