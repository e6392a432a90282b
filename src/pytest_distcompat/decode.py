"""Encoding of dataclasses as plain data, and decoding from JSON.

Ranks write what they recorded (``trace.Snapshot``) as lines of JSON, pytest's process reads them,
and so do several other pairs of processes with files between them. ``encode`` and ``json.dumps``
write a dataclass; ``json.loads`` and ``decode`` read it, with msgspec, which checks each type.
Where a rank lacks msgspec, no type is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

# A rank of a script under ``uv run`` has the packages of the script alone.
try:
    import msgspec
except ModuleNotFoundError:
    _HAS_MSGSPEC = False
else:
    _HAS_MSGSPEC = True

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return a value of a trace as plain data for JSON.

    Dataclasses, also those in tuples and mappings, become dictionaries:
    ``MeshDim("tp", 2, 0, "Replicate")`` becomes ``{"name": "tp", "size": 2, ...}``.
    """
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


#: The types whose values JSON can write as they are.
_PLAIN = frozenset({str, int, float, bool, type(None)})


def decode(kind: type[T], data: Any) -> T:
    """Return the value that ``encode`` and JSON wrote.

    Keys that a newer version wrote are passed over.

    Args:
        kind: The dataclass.
        data: What ``json.loads`` returned.

    Raises:
        ValueError: If a field is missing, or is of another type than the dataclass says.
        TypeError: Without msgspec, if a field is missing.
    """
    if not _HAS_MSGSPEC:
        return typing.cast("T", _unchecked(kind, data))
    try:
        return msgspec.convert(data, kind, dec_hook=_from_name)
    except msgspec.ValidationError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def prepare(*kinds: type) -> None:
    """Inspect these types now, rather than when the first value is decoded.

    msgspec reads the annotations of a dataclass once. A test may break what that needs, such as
    ``sys.modules``, before the first value comes.
    """
    for kind in kinds:
        # Fields are missing, so this fails, after the annotations were read.
        with contextlib.suppress(ValueError, TypeError):
            decode(kind, {})


def _from_name(kind: Any, name: Any) -> Any:
    """Return the value of a type that is written as a name: the status of a verdict.

    msgspec calls it for types that it does not know.
    """
    return kind.from_name(name)


def _unchecked(kind: Any, data: Any) -> Any:
    """Return the value that ``encode`` and JSON wrote, of which no type is checked.

    Where msgspec is missing, a rank reads only what this package wrote in the same run. A dataclass
    may be nested in fields, tuples and mappings; a field that may also be None has none in it.

    Raises:
        TypeError: A field without a default is missing.
    """
    if dataclasses.is_dataclass(kind):
        types = typing.get_type_hints(kind)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            if field.name in data:
                values[field.name] = _unchecked(types[field.name], data[field.name])
        return kind(**values)  # type: ignore[operator]
    if isinstance(data, list):
        # JSON has no tuples, and a dataclass of ours no lists. Values of one tuple that have
        # different types are plain, so that the first type does for all.
        kind_of_values, *_ = typing.get_args(kind) or (Any,)
        return tuple(_unchecked(kind_of_values, value) for value in data)
    if isinstance(data, Mapping):
        _, kind_of_values = typing.get_args(kind) or (str, Any)
        return {name: _unchecked(kind_of_values, value) for name, value in data.items()}
    return data
