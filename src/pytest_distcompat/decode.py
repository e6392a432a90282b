"""Encoding of dataclasses as plain data, and decoding from JSON.

Ranks write what they recorded (``trace.Snapshot``) as lines of JSON, pytest's process reads them,
and so do several other pairs of processes with files between them. ``encode`` and ``json.dumps``
write a dataclass; ``json.loads`` and ``decode`` read it, with msgspec, which checks each type.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

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


_PLAIN = frozenset({str, int, float, bool, type(None)})


def decode(kind: type[T], data: Any) -> T:
    """Return the value that ``encode`` and JSON wrote.

    Keys that a newer version wrote are passed over.

    Args:
        kind: The dataclass.
        data: What ``json.loads`` returned.

    Raises:
        ValueError: If a field is missing, or is of another type than the dataclass says.
    """
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
        with contextlib.suppress(ValueError):
            decode(kind, {})


def _from_name(kind: Any, name: Any) -> Any:
    """Return the value of a type that is written as a name: the status of a verdict.

    msgspec calls it for types that it does not know.
    """
    return kind.from_name(name)
