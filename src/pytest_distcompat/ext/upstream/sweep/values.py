"""Values to try for a setting, by its type, and how a setting spells them.

The sweep tries each field of a library's object with a few values: ``values_to_try`` returns them
for a type. A bool has both, an int the numbers of NUMBERS, a ``Literal`` or an enumeration all its
members; a text that may be anything has none, unless ``rules.json`` gives some. ``text`` spells a
value as it stands in a cell's id: ``AdamW.amsgrad=true``, ``torch.float16``.

``reading.py`` and ``_variables.py`` call it, in the process that imports the libraries.
"""

from __future__ import annotations

import enum
import json
import pkgutil
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

#: Whole numbers to try: small ones, a prime, and one that is larger than any tiny model.
NUMBERS = (0, 1, 2, 7, 1_000_003)
#: Fractions to try.
FRACTIONS = (0.0, 0.5, 1.0)
#: Type -> its values to try.
_VALUES: Mapping[type, tuple[Any, ...]] = {
    type(None): (None,),
    bool: (True, False),
    int: NUMBERS,
    float: FRACTIONS,
}


def parts_of(kind: Any) -> list[Any]:
    """Return the members of a union, else the type itself: ``int | None`` has two.

    An annotation that is a text, ``ForwardRef("torch.dtype")``, is resolved if it is an import
    path.
    """
    if isinstance(kind, typing.ForwardRef):
        try:
            return [pkgutil.resolve_name(kind.__forward_arg__)]
        except (ImportError, AttributeError, ValueError):
            return [kind]
    if typing.get_origin(kind) not in {typing.Union, types.UnionType}:
        return [kind]
    parts = []
    for member in typing.get_args(kind):
        parts += parts_of(member)
    return parts


def values_to_try(kind: Any, default: Any) -> list[Any]:
    """Return the values to try for a type; none where the type does not say.

    Args:
        kind: A type or an annotation: ``bool | None``.
        default: The default of the field, which may be among the values.
    """
    values: list[Any] = []
    for part in parts_of(kind):
        values += _values_of_part(part, default)
    # Of ``str | None`` only None is known, which is its default: there is nothing to try.
    if default is None and all(value is None for value in values):
        return []
    return values


def _values_of_part(part: Any, default: Any) -> Iterable[Any]:
    """Return the values to try for a type that is no union."""
    if isinstance(part, type) and part in _VALUES:
        return _VALUES[part]
    if isinstance(part, type) and issubclass(part, enum.Enum):
        return list(part)
    if typing.get_origin(part) is typing.Literal:
        return typing.get_args(part)
    # Libraries annotate some flags as texts.
    if part is str and str(default).lower() in {"true", "false"}:
        return (True, False)
    # ``torch.dtype``; the library that has it has imported torch.
    if getattr(part, "__qualname__", "") == "dtype":
        torch = sys.modules["torch"]
        return (torch.float32, torch.bfloat16, torch.float16)
    return ()


def text(value: Any) -> str:
    """Return a value as a setting spells it.

    It is JSON (``true``, ``null``, ``0.5``), or the import path of an enumeration's member or a
    dtype. ``cell.setting_value`` reads it again.
    """
    if isinstance(value, enum.Enum) and not isinstance(value, (str, int)):
        kind = type(value)
        return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    # A cell's id has hyphens between its parts, so that a hyphen is spelled as a tilde.
    return str(value).replace("-", "~").replace(" ", "")
