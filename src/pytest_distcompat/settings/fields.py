"""Fields of the objects that a driver configures its libraries with, read from the installed releases."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import enum
import importlib.util
import inspect
import itertools
import json
import operator
import os
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

#: Whole numbers and fractions to try: small ones, a prime, and one that is larger than any tiny model.
NUMBERS, FRACTIONS = (0, 1, 2, 7, 1_000_003), (0.0, 0.5, 1.0)
_VALUES: Mapping[type, tuple[Any, ...]] = {type(None): (None,), bool: (True, False), int: NUMBERS, float: FRACTIONS}
#: A key that no config model has, so that the model's error names the model.
_UNKNOWN_KEY = "distcompat_unknown"
#: Libraries that a driver may do without.
_OPTIONAL = ("accelerate", "deepspeed", "torchao", "transformers")
#: Names of limits, in ``operator`` and in pydantic's metadata.
_LIMITS = ("ge", "gt", "le", "lt")


@dataclass(frozen=True)
class Source:
    """An object whose fields a driver sets.

    Attributes:
        name: How a setting names it: ``ds_config`` in ``ds_config.zero_optimization.overlap_comm=false``.
        target: Its import path: a dataclass, a pydantic model, a function, or a class with keyword arguments.
        strategies: The strategies under which the driver makes it.
        kind: ``fields``; ``subclasses``, if ``target`` is the base of the classes that are meant; ``keys``, if ``target``
            reads a dictionary whose keys are the fields; ``environment`` for the variables that ``target`` reads when it is made.
        precision: The precision under which it matters.
        becomes: The import path of a function from what ``target`` makes to the settings of ``ds_config`` that come of it.
    """

    name: str
    target: str
    strategies: tuple[str, ...]
    kind: str = "fields"
    precision: str = "fp32"
    becomes: str = ""

    def names(self, setting: str, strategy: str) -> bool:
        """Tell whether a setting is one of this object's, or of what becomes of it under that strategy."""
        prefix = "env" if self.kind == "environment" else self.name
        in_json = bool(self.becomes) and strategy.startswith("zero") and setting.startswith("ds_config.")
        return in_json or (self.kind != "subclasses" and setting.startswith(f"{prefix}."))


@dataclass(frozen=True)
class Field:
    """A field of a source: its full name, its type and default as text, and values other than the default as text.

    ``places`` are the full names of other settings that say the same.
    """

    name: str
    type: str
    default: str
    values: tuple[str, ...]
    strategies: tuple[str, ...]
    precision: str
    places: tuple[str, ...] = ()


def read_fields(sources: list[Source]) -> list[Field]:
    """Return the fields of all sources. It imports the libraries that define them; one that is not installed has none."""
    found: list[Field] = []
    for source in sources:
        library = source.target.partition(".")[0]
        if library not in _OPTIONAL or importlib.util.find_spec(library) is not None:
            # TrainingArguments of transformers 4 set variables with which accelerate's plugin then refuses to be made.
            with mock.patch.dict(os.environ):
                found += _fields_of(source)
    return found


def _fields_of(source: Source) -> Iterator[Field]:
    target = pkgutil.resolve_name(source.target)
    if source.kind == "subclasses":
        for kind in target.__subclasses__():
            yield from _made(dataclasses.replace(source, name=kind.__name__), _members(kind))
    elif source.kind == "environment":
        yield from _variables(source, target)
    else:
        became = _became(pkgutil.resolve_name(source.becomes), target) if source.becomes else {}
        for field in _made(source, _keys(target) if source.kind == "keys" else _members(target)):
            yield dataclasses.replace(field, places=became.get(field.name.removeprefix(f"{source.name}."), ()))


def _made(source: Source, members: Iterator[tuple[str, Any, Any, Any]]) -> Iterator[Field]:
    for name, kind, default, accepts in members:
        found = [value for value in _values(kind, default) if value != default or isinstance(value, bool)]
        texts = (text(value) for value in found if value is None or accepts(value))
        values = tuple(dict.fromkeys(one for one in texts if one != text(default)))
        shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
        yield Field(f"{source.name}.{name}", shown, text(default), values, source.strategies, source.precision)


def _variables(source: Source, target: Any) -> Iterator[Field]:
    """Yield the environment variables that change a field of what ``target`` makes, with the values that it accepts."""

    def spelled(value: Any) -> str:
        return text(value).rpartition(".")[2] if isinstance(value, enum.Enum) else text(value)

    values = {name: [*map(spelled, _values(kind, default))] for name, kind, default, _ in _members(target)}
    _in_environment(target, {}, {})  # the first time, the variables of what it imports are read too
    read: dict[str, Any] = {}
    base, again = _in_environment(target, {}, read), _in_environment(target, {}, {})
    fields = [name for name in values if base[name] == again[name]]
    for variable in read:
        texts = dict.fromkeys(itertools.chain(*values.values()))
        found = {one: made for one in texts if (made := _in_environment(target, {variable: one}, {}))}
        changed = next((name for name in fields if any(made[name] != base[name] for made in found.values())), None)
        accepted = tuple(one for one in dict.fromkeys(values.get(changed or "", ())) if one in found and one != "null")
        if accepted:
            place = (f"{source.name}.{changed}",)
            yield Field(f"env.{variable}", "str", "", accepted, source.strategies, source.precision, place)


def _in_environment(target: Any, variables: Mapping[str, str], read: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of what is made with these variables, and fill in what was read; no fields if it is refused."""
    was = os.environ
    # What is set meanwhile is forgotten.
    os.environ = _Recorder({**was, **variables}, read)  # type: ignore[assignment]  # noqa: B003
    try:
        made = target()
    except Exception:
        return {}
    finally:
        os.environ = was  # noqa: B003
    return {name: getattr(made, name, None) for name in inspect.signature(target).parameters}


def _became(becomes: Callable[[Any], Mapping[str, Any]], target: Any) -> dict[str, tuple[str, ...]]:
    """Return, for each field, the keys of DeepSpeed's JSON that other values of it change."""
    found: dict[str, tuple[str, ...]] = {}
    try:
        base = dict(_leaves("ds_config", becomes(target())))
    except ImportError:
        return found  # without DeepSpeed
    for name, kind, default, _ in _members(target):
        changed: dict[str, None] = {}
        for value in _values(kind, default):
            with contextlib.suppress(Exception):
                made = dict(_leaves("ds_config", becomes(target(**{name: value}))))
                changed |= dict.fromkeys(key for key in made if made[key] != base.get(key))
        found[name] = tuple(changed)
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _leaves(f"{name}.{key}", inner) if isinstance(inner, Mapping) else [(f"{name}.{key}", inner)]


def _members(target: Any) -> Iterator[tuple[str, Any, Any, Callable[[Any], bool]]]:
    """Yield name, type, default and a test of values for each field of a dataclass, pydantic model or signature."""
    if hasattr(target, "model_fields"):
        for name, field in target.model_fields.items():
            inner = next((one for one in _parts(field.annotation) if hasattr(one, "model_fields")), None)
            for below, kind, default, accepts in _members(inner) if inner else ():
                yield f"{field.alias or name}.{below}", kind, default, accepts
            if not inner:
                default = None if field.is_required() else field.get_default(call_default_factory=True)
                yield field.alias or name, field.annotation, default, _accepted(field)
        return
    owner = vars(target).get("__init__", target) if isinstance(target, type) else target
    hints = _hints(target if dataclasses.is_dataclass(target) else owner)
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            default = None if parameter.default is parameter.empty else parameter.default
            yield parameter.name, hints.get(parameter.name, type(default)), default, lambda _: True


def _accepted(field: Any) -> Callable[[Any], bool]:
    """Return a test whether a value is within the limits of a pydantic field."""
    pairs = ((one, name) for one in field.metadata for name in _LIMITS if hasattr(one, name))
    limits = [(getattr(operator, name), getattr(one, name)) for one, name in pairs]
    return lambda value: all(compare(value, limit) for compare, limit in limits)


def _hints(target: Any) -> dict[str, Any]:
    """Return the resolved annotations; those that cannot be resolved here stay texts."""
    try:
        return typing.get_type_hints(target)
    except Exception:
        found = dict(getattr(target, "__annotations__", {}))
        space = {**vars(builtins), **vars(typing), **vars(sys.modules[target.__module__])}
        for name, kind in found.items():
            with contextlib.suppress(Exception):
                found[name] = eval(kind, space) if isinstance(kind, str) else kind  # noqa: S307 - an installed library's annotation
        return found


def _parts(kind: Any) -> list[Any]:
    """Return the members of a union, else the type itself."""
    if isinstance(kind, typing.ForwardRef):
        try:
            return [pkgutil.resolve_name(kind.__forward_arg__)]
        except (ImportError, AttributeError, ValueError):
            return [kind]
    union = typing.get_origin(kind) in {typing.Union, types.UnionType}
    return [part for member in typing.get_args(kind) for part in _parts(member)] if union else [kind]


def _values(kind: Any, default: Any) -> list[Any]:
    """Return the values to try for a type; none where the type does not say."""
    found: list[Any] = []
    for part in _parts(kind):
        if isinstance(part, type) and part in _VALUES:
            found += _VALUES[part]
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            found += list(part)
        elif typing.get_origin(part) is typing.Literal:
            found += typing.get_args(part)
        elif part is str and str(default).lower() in {"true", "false"}:
            found += [True, False]
        elif getattr(part, "__qualname__", "") == "dtype":
            found += [getattr(sys.modules["torch"], name) for name in ("float32", "bfloat16", "float16")]
    # None beside nothing that can be derived is the default of most such fields, and says nothing alone.
    return found if any(value is not None for value in found) or default is not None else []


def text(value: Any) -> str:
    """Return a value as a setting spells it: JSON, or the import path of an enumeration's member or a dtype."""
    if isinstance(value, enum.Enum) and not isinstance(value, (str, int)):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    value = value.value if isinstance(value, enum.Enum) else value
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    # A cell's id has hyphens between its parts.
    return str(value).replace("-", "~").replace(" ", "")


class _Recorder(dict[str, Any]):
    """A dictionary that records which keys are read, with their defaults."""

    def __init__(self, given: Mapping[str, Any], read: dict[str, Any]) -> None:
        super().__init__(given)
        self.read = read

    def get(self, key: str, default: Any = None) -> Any:
        self.read[key] = default if self.read.get(key) is None else self.read[key]
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.get(key, default)
        return super().setdefault(key, default)

    def keys(self) -> Any:
        # ``key in config.keys()`` is a lookup too.
        return self

    def __contains__(self, key: object) -> bool:
        self.read.setdefault(str(key), None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.setdefault(key, None)
        return super().__getitem__(key)


def _keys(reader: Callable[[dict[str, Any]], Any]) -> Iterator[tuple[str, Any, Any, Callable[[Any], bool]]]:
    """Yield name, type, default and a test of values for each key that the function reads from a dictionary."""
    read: dict[str, Any] = {}
    _call(reader, _Recorder({}, read))
    for key, default in list(read.items()):
        nested: dict[str, Any] = {}
        if default is None or isinstance(default, dict):
            error = _call(reader, {key: {_UNKNOWN_KEY: 1}})
            model = _model_named(getattr(error, "title", ""))
            if model is not None:
                # One model may hold several keys (DeepSpeed's monitors): the place of the error says which.
                for outer in error.errors()[0]["loc"][:-1]:  # type: ignore[union-attr]
                    model = model.model_fields[outer].annotation
                yield from ((f"{key}.{name}", *more) for name, *more in _members(model))
                continue
            _call(reader, {key: _Recorder({"enabled": True}, nested)})
        members = {f"{key}.{name}": inner for name, inner in nested.items()} or {key: default}
        yield from ((name, type(default), default, lambda _: True) for name, default in members.items())


def _call(reader: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Exception | None:
    """Return the exception with which the function ends: it has no whole config, and has read what it reads."""
    try:
        reader(config)
    except Exception as error:
        return error
    return None


def _model_named(name: str) -> Any:
    """Return the pydantic model of that name, None if there is none."""
    if not name:
        return None
    from pydantic import BaseModel

    kinds: list[Any] = [BaseModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return next((kind for kind in kinds if kind.__name__ == name), None)
