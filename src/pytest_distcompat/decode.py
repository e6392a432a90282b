"""Encoding of dataclasses as plain data, and decoding from JSON."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a value of a trace as plain data: dataclasses, also those in tuples and mappings, as dictionaries."""
    # ``dataclasses.asdict`` copies each number and text too: that took a tenth of the CPU time of a
    # rank.
    if isinstance(value, tuple):
        # Most are of numbers: the ranks of a mesh, a thousand for each parameter of a large mesh.
        if _PLAIN.issuperset(map(type, value)):
            return value
        return tuple(map(encode, value))
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for name, entry in value.items():
            # Without a call for what is plain already, which is most.
            plain[name] = entry if type(entry) in _PLAIN else encode(entry)
        return plain
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
    # Cached by type: a session reads millions of values, and inspecting the type of each took
    # longer than all checks.
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _reader_of_fields(kind)
    from_name: Callable[[Any], Any] | None = getattr(kind, "from_name", None)
    if from_name is not None:
        return from_name
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        return _reader_of_optional(arguments)
    if origin is tuple:
        return _reader_of_tuple(_reader(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _reader_of_mapping(_reader(arguments[1]))
    return None


def _reader_of_optional(members: tuple[Any, ...]) -> Callable[[Any], Any] | None:
    """Return the reader of ``X | None``: of the first member that is not None."""
    others = [member for member in members if member is not type(None)]
    reader = _reader(others[0])
    if reader is None:
        return None

    def read(data: Any) -> Any:
        if data is None:
            return None
        return reader(data)

    return read


def _reader_of_tuple(reader: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return the reader of ``tuple[X, ...]``, from that of its elements."""
    if reader is None:
        return tuple
    return lambda data: tuple(map(reader, data))


def _reader_of_mapping(reader: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Return the reader of ``Mapping[str, X]``, from that of its values."""
    if reader is None:
        return None
    return lambda data: {key: reader(value) for key, value in data.items()}


def _reader_of_fields(kind: type) -> Callable[[Any], Any]:
    hint_by_name = typing.get_type_hints(kind)
    # A field that is not in ``__init__`` follows from the others, and is not written.
    names = dict.fromkeys(field.name for field in dataclasses.fields(kind) if field.init)
    readers: dict[str, Callable[[Any], Any]] = {}
    for name in names:
        reader = _reader(hint_by_name[name])
        if reader is not None:
            readers[name] = reader

    def read(data: Mapping[str, Any]) -> Any:
        # Skip the keys that a newer version wrote.
        values = {name: value for name, value in data.items() if name in names}
        for name, reader in readers.items():
            if name in values:
                values[name] = reader(values[name])
        return kind(**values)

    return read
