"""Read the fields of sources from the installed libraries: which settings there are to try.

A source is an object that a driver configures its libraries with, such as ``torch.optim.AdamW`` or
DeepSpeed's JSON (``fields.Source``). ``__main__`` calls ``read_fields(sources)`` in a process of
its own, which imports the libraries; ``rules.read`` has started it. A ``Field`` of the result has a
name, a type, a default and the other values to try:
``Field("AdamW.amsgrad", "bool", "false", ("true",), ...)``.

How the fields of a source are found depends on its kind: they are declared (``_members.py``), keys
that a function reads (``_keys.py``), or environment variables (``_variables.py``). A *member* is
what these modules return of a field: its name, type, default and limits. A ``Field`` has its
default and values as texts, as ``text`` writes them: ``true``, ``null``, ``0.5``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

from pytest_distcompat.ext.upstream.sweep._keys import keys_of
from pytest_distcompat.ext.upstream.sweep._members import Member, members_of
from pytest_distcompat.ext.upstream.sweep._variables import variables_of
from pytest_distcompat.ext.upstream.sweep.fields import Field, Source
from pytest_distcompat.ext.upstream.sweep.values import text, values_to_try

#: Libraries that may be missing; torch may not.
_OPTIONAL = ("accelerate", "deepspeed", "peft", "torchao", "transformers")


def read_fields(sources: list[Source]) -> list[Field]:
    """Return the fields of all sources, whose libraries it imports.

    A library that is not installed has none.
    """
    fields: list[Field] = []
    for source in sources:
        library, _, _ = source.target.partition(".")
        if library not in _OPTIONAL or importlib.util.find_spec(library) is not None:
            # Variables that a source sets are forgotten: TrainingArguments of transformers 4 set
            # some with which accelerate's plugin then refuses to be made.
            with mock.patch.dict(os.environ):
                fields += _fields_of(source)
    return fields


def _fields_of(source: Source) -> Iterator[Field]:
    """Yield the fields of a source, as its kind says."""
    target = pkgutil.resolve_name(source.target)
    if source.kind == "subclasses":
        # The target is a base class, as accelerate's ``KwargsHandler`` is of
        # ``DistributedDataParallelKwargs`` and others. The fields are those of its subclasses.
        for subclass in target.__subclasses__():
            named = dataclasses.replace(source, name=subclass.__name__)
            yield from _fields(named, members_of(subclass))
    elif source.kind == "environment":
        yield from variables_of(source, target)
    elif source.kind == "keys":
        yield from _fields(source, keys_of(target))
    else:
        yield from _fields_with_places(source, target)


def _fields_with_places(source: Source, target: Any) -> Iterator[Field]:
    """Yield the fields of a class or function.

    What the target makes may be turned into DeepSpeed's JSON, as accelerate's ``DeepSpeedPlugin``
    is. Then ``source.becomes`` is the import path of the function that returns this JSON, and each
    field has the keys that it changes as ``places``.
    """
    places: dict[str, tuple[str, ...]] = {}
    if source.becomes:
        places = _json_keys_by_field(pkgutil.resolve_name(source.becomes), target)
    for field in _fields(source, members_of(target)):
        name = field.name.removeprefix(f"{source.name}.")
        yield dataclasses.replace(field, places=places.get(name, ()))


def _fields(source: Source, members: Iterable[Member]) -> Iterator[Field]:
    """Yield the members of a source as fields with the values to try."""
    for member in members:
        # A source may name the only fields that are to be tried.
        if not source.means(member.name):
            continue
        yield Field(
            name=f"{source.name}.{member.name}",
            type=_type_name(member.type),
            default=text(member.default),
            values=_other_spellings(member),
            strategies=source.strategies,
            precision=source.precision,
        )


def _type_name(kind: Any) -> str:
    """Return a type or annotation as text."""
    if isinstance(kind, type):
        return kind.__name__
    return str(kind).replace("typing.", "")


def _other_spellings(member: Member) -> tuple[str, ...]:
    """Return the values to try other than the default, as text, each once.

    Values beyond the member's limits are left out.
    """
    default = text(member.default)
    spellings: dict[str, None] = {}
    for value in values_to_try(member.type, member.default):
        # A bool equals the default 0 or 1, and is another setting.
        differs = value != member.default or isinstance(value, bool)
        if differs and (value is None or member.accepts(value)):
            spellings[text(value)] = None
    spellings.pop(default, None)
    return tuple(spellings)


def _json_keys_by_field(
    becomes: Callable[[Any], Mapping[str, Any]], target: Any
) -> dict[str, tuple[str, ...]]:
    """Return field -> the keys of DeepSpeed's JSON that other values of it change.

    For example ``{"gradient_clipping": ("ds_config.gradient_clipping",)}``. They are found by
    making the target with each value.

    Args:
        becomes: Returns the JSON of an object that ``target`` has made.
        target: The class or function whose keyword arguments are the fields.
    """
    try:
        json_of_defaults = becomes(target())
    except ImportError:
        return {}  # without DeepSpeed
    base = dict(_leaves("ds_config", json_of_defaults))
    keys_by_field = {}
    for member in members_of(target):
        changed: dict[str, None] = {}
        for value in values_to_try(member.type, member.default):
            # Not every value fits the other fields' defaults.
            with contextlib.suppress(Exception):
                made = target(**{member.name: value})
                for key, leaf in _leaves("ds_config", becomes(made)):
                    if leaf != base.get(key):
                        changed[key] = None
        keys_by_field[member.name] = tuple(changed)
    return keys_by_field


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the full name and the value of each leaf of a nested mapping.

    ``{"fp16": {"enabled": True}}`` with the name ``ds_config`` has ``("ds_config.fp16.enabled",
    True)``.
    """
    if not isinstance(value, Mapping):
        return
    for key, member in value.items():
        if isinstance(member, Mapping):
            yield from _leaves(f"{name}.{key}", member)
        else:
            yield f"{name}.{key}", member
