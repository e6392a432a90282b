"""Encoding of dataclasses as plain data; decoding and validation from JSON."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a value of a trace as plain data: dataclasses, also those in tuples and mappings, as dictionaries."""
    # ``dataclasses.asdict`` copies each number and text too: that took a tenth of the CPU time of a rank.
    if isinstance(value, tuple):
        return tuple(map(encode, value))
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {name: one if type(one) in _PLAIN else encode(one) for name, one in value.items()}
    return value


_PLAIN = frozenset({str, int, float, bool, type(None)})


def decode(kind: type[T], data: Any) -> T:
    """Return the value of that type that ``encode`` and JSON wrote; its types are those in a trace."""
    target: Any = kind
    reader = _reader(target)
    value: T = data if reader is None else reader(data)
    return value


def prepare(*kinds: type) -> None:
    """Inspect these types now, rather than when the first value is decoded: a test may break what that needs."""
    for kind in kinds:
        _reader(kind)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that decodes a value of that type, None where JSON's own value is right."""
    # Cached by type: a session reads millions of values, and inspecting the type of each took longer than all checks.
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _reader_of_fields(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if origin is types.UnionType or origin is typing.Union:
        one = _reader(next(one for one in arguments if one is not type(None)))
        return None if one is None else lambda data: None if data is None else one(data)
    if origin is tuple:
        part = _reader(arguments[0])
        return tuple if part is None else lambda data: tuple(map(part, data))
    if origin is not None and issubclass(origin, Mapping):
        value = _reader(arguments[1])
        return None if value is None else lambda data: {key: value(each) for key, each in data.items()}
    return None


def _reader_of_fields(kind: type) -> Callable[[Any], Any]:
    every = typing.get_type_hints(kind)
    hints = {field.name: every[field.name] for field in dataclasses.fields(kind) if field.init}
    readers = {name: reader for name, hint in hints.items() if (reader := _reader(hint)) is not None}

    def read(data: Mapping[str, Any]) -> Any:
        # Skip the keys that a newer version wrote.
        values = {name: value for name, value in data.items() if name in hints}
        for name, reader in readers.items():
            if name in values:
                values[name] = reader(values[name])
        return kind(**values)

    return read


class MalformedError(ValueError):
    """JSON with a wrong type or a missing key; the message names the field."""


def check(kind: Any, data: Any, where: str) -> None:
    """Raise MalformedError if the JSON at ``where`` does not have that type.

    Types are those of ``decode``, lists, typed dictionaries, literals, ``str``, ``int``, ``float`` and ``Any``. Unknown
    keys are ignored.
    """
    if not (problem := _problem(kind, data)):
        return
    if isinstance(problem, str):
        raise MalformedError(f"{where or 'it'} is {_shown(data)}; expected {problem}")
    for name, of, one in problem:
        if of is None:
            raise MalformedError(f"{name!r} is missing{where and f' in {where}'}")
        # Nearly all values are texts; a long report has a million.
        if type(one) is not of:
            check(of, one, f"{where}[{name}]" if isinstance(name, int) else f"{where}.{name}" if where else str(name))


def _problem(kind: Any, data: Any) -> str | list[tuple[Any, Any, Any]]:
    """Return what was expected instead, or the parts to check: name, type (None if missing) and value."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return []
    if origin in {types.UnionType, typing.Union}:
        options = [one for one in arguments if one is not type(None)]
        if data is None:
            return [] if len(options) < len(arguments) else " or ".join(_NAMES[one] for one in options)
        fitting = [one for one in options if not isinstance(_problem(one, data), str)]
        return _problem(fitting[0] if fitting else options[0], data)
    if origin is typing.Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        known = arguments or tuple(one.value for one in kind)
        return [] if data in known else f"one of {', '.join(known)}"
    if kind in _NAMES:
        # In Python a bool is an int; in a report it is not.
        fits = isinstance(data, (int, float) if kind is float else kind) and (
            kind is bool or not isinstance(data, bool)
        )
        return "" if fits else _NAMES[kind]
    if origin in {list, tuple}:
        return [(index, arguments[0], one) for index, one in enumerate(data)] if isinstance(data, list) else "a list"
    if not isinstance(data, Mapping):
        return "an object"
    if origin is not None:
        return [(name, arguments[1], one) for name, one in data.items()]
    hints, needed = _fields(kind)
    missing: list[tuple[Any, Any, Any]] = [(name, None, None) for name in needed if name not in data]
    return missing or [(name, hint, data[name]) for name, hint in hints.items() if name in data]


_NAMES: Mapping[Any, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@functools.cache
def _fields(kind: type) -> tuple[dict[str, Any], list[str]]:
    """Return the types of the keys, and which keys must be there, in order."""
    hints = typing.get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        return hints, [name for name in hints if name in kind.__required_keys__]  # type: ignore[attr-defined]
    fields = [field for field in dataclasses.fields(kind) if field.init]
    lacking = dataclasses.MISSING
    needed = [one.name for one in fields if one.default is lacking and one.default_factory is lacking]
    return hints, needed


def _shown(data: Any) -> str:
    """Return a value in a few words."""
    if isinstance(data, list):
        return "a list"
    if isinstance(data, Mapping):
        return "an object"
    return "null" if data is None else ascii(data)[:60]
