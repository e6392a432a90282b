"""Dataclasses back from JSON."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def decode(kind: type[T], data: Any) -> T:
    """The value of that type, from what ``dataclasses.asdict`` and JSON made of it.

    Of the types that stand in a trace: dataclasses, tuples of one type, mappings, what may be None, and what JSON has itself.
    """
    wanted: Any = kind
    reader = _reader(wanted)
    value: T = data if reader is None else reader(data)
    return value


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """What reads a value of that type back; None where JSON's own value is the one.

    Found out once a type: a run reads millions of values, and to ask ``typing`` about each took longer than all checks.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _reader_of_fields(kind)
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
    hints = typing.get_type_hints(kind)
    readers = {name: reader for name, hint in hints.items() if (reader := _reader(hint)) is not None}

    def read(data: Mapping[str, Any]) -> Any:
        # What a newer version wrote besides is passed over.
        told = {name: value for name, value in data.items() if name in hints}
        for name, reader in readers.items():
            if name in told:
                told[name] = reader(told[name])
        return kind(**told)

    return read
