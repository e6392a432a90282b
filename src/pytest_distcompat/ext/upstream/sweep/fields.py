"""Fields of the objects that a driver configures its libraries with, read from the installed releases."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import enum
import importlib.util
import inspect
import json
import operator
import os
import pkgutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

#: Whole numbers and fractions to try: small ones, a prime, and one that is larger than any tiny
#: model.
NUMBERS = (0, 1, 2, 7, 1_000_003)
FRACTIONS = (0.0, 0.5, 1.0)
_VALUES: Mapping[type, tuple[Any, ...]] = {
    type(None): (None,),
    bool: (True, False),
    int: NUMBERS,
    float: FRACTIONS,
}
#: A function that reads its configuration from a dictionary.
_ConfigReader = Callable[[dict[str, Any]], Any]
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
        name: How a setting names it: ``ds_config`` in
            ``ds_config.zero_optimization.overlap_comm=false``.
        target: Its import path: a dataclass, a pydantic model, a function, or a class with keyword
            arguments.
        strategies: The strategies under which the driver makes it.
        kind: ``fields``; ``subclasses``, if ``target`` is the base of the classes that are meant;
            ``keys``, if ``target`` reads a dictionary whose keys are the fields; ``environment``
            for the variables that ``target`` reads when it is made.
        precision: The precision under which it matters.
        becomes: The import path of a function from what ``target`` makes to the settings of
            ``ds_config`` that come of it.
    """

    name: str
    target: str
    strategies: tuple[str, ...]
    kind: str = "fields"
    precision: str = "fp32"
    becomes: str = ""

    def names(self, setting: str, strategy: str) -> bool:
        """Tell whether a setting is one of this object's, or of what becomes of it under that strategy."""
        if self.becomes and strategy.startswith("zero") and setting.startswith("ds_config."):
            return True
        if self.kind == "subclasses":
            return False
        prefix = "env" if self.kind == "environment" else self.name
        return setting.startswith(f"{prefix}.")


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


@dataclass(frozen=True)
class _Member:
    """A field as its owner declares it.

    Attributes:
        name: Its name, with dots for what is nested.
        type: Its type or annotation.
        default: Its default, None where it has none.
        accepts: Tells whether a value is within its limits.
    """

    name: str
    type: Any
    default: Any
    accepts: Callable[[Any], bool] = lambda _value: True


def read_fields(sources: list[Source]) -> list[Field]:
    """Return the fields of all sources. It imports the libraries that define them; one that is not installed has none."""
    fields: list[Field] = []
    for source in sources:
        library, _, _ = source.target.partition(".")
        if library not in _OPTIONAL or importlib.util.find_spec(library) is not None:
            # TrainingArguments of transformers 4 set variables with which accelerate's plugin then
            # refuses to be made.
            with mock.patch.dict(os.environ):
                fields += _fields_of(source)
    return fields


def _fields_of(source: Source) -> Iterator[Field]:
    target = pkgutil.resolve_name(source.target)
    if source.kind == "subclasses":
        for subclass in target.__subclasses__():
            named = dataclasses.replace(source, name=subclass.__name__)
            yield from _fields(named, _members(subclass))
    elif source.kind == "environment":
        yield from _variables(source, target)
    elif source.kind == "keys":
        yield from _fields(source, _keys(target))
    else:
        yield from _fields_with_places(source, target)


def _fields_with_places(source: Source, target: Any) -> Iterator[Field]:
    """Yield the fields of a class or function, each with the keys of DeepSpeed's JSON that come of it."""
    places: dict[str, tuple[str, ...]] = {}
    if source.becomes:
        places = _json_keys_by_field(pkgutil.resolve_name(source.becomes), target)
    for field in _fields(source, _members(target)):
        name = field.name.removeprefix(f"{source.name}.")
        yield dataclasses.replace(field, places=places.get(name, ()))


def _fields(source: Source, members: Iterable[_Member]) -> Iterator[Field]:
    for member in members:
        yield Field(
            f"{source.name}.{member.name}",
            _type_name(member.type),
            text(member.default),
            _other_spellings(member),
            source.strategies,
            source.precision,
        )


def _type_name(kind: Any) -> str:
    if isinstance(kind, type):
        return kind.__name__
    return str(kind).replace("typing.", "")


def _other_spellings(member: _Member) -> tuple[str, ...]:
    """Return the values to try other than the default, as text, each once."""
    default = text(member.default)
    spellings: dict[str, None] = {}
    for value in _values(member.type, member.default):
        # A bool equals the default 0 or 1, and is another setting.
        differs = value != member.default or isinstance(value, bool)
        if differs and (value is None or member.accepts(value)):
            spellings[text(value)] = None
    spellings.pop(default, None)
    return tuple(spellings)


def _variables(source: Source, target: Any) -> Iterator[Field]:
    """Yield the environment variables that change a field of what ``target`` makes, with the values that it accepts."""
    spellings_by_field = {member.name: _variable_spellings(member) for member in _members(target)}
    all_spellings: dict[str, None] = {}
    for spellings in spellings_by_field.values():
        all_spellings.update(dict.fromkeys(spellings))
    _in_environment(target, {}, {})  # the first time, the variables of what it imports are read too
    variables: dict[str, Any] = {}
    base = _in_environment(target, {}, variables)
    again = _in_environment(target, {}, {})
    stable_fields = [name for name in spellings_by_field if base[name] == again[name]]
    for variable in variables:
        made_by_spelling = {}
        for spelling in all_spellings:
            made = _in_environment(target, {variable: spelling}, {})
            if made:
                made_by_spelling[spelling] = made
        changed = _changed_field(stable_fields, base, made_by_spelling.values())
        if changed is None:
            continue
        usable = made_by_spelling.keys() - {"null"}
        accepted = [
            spelling
            for spelling in dict.fromkeys(spellings_by_field[changed])
            if spelling in usable
        ]
        if accepted:
            places = (f"{source.name}.{changed}",)
            yield Field(
                f"env.{variable}",
                "str",
                "",
                tuple(accepted),
                source.strategies,
                source.precision,
                places,
            )


def _variable_spellings(member: _Member) -> list[str]:
    """Return the values to try as an environment variable has them: of an enumeration the name alone."""
    spellings = []
    for value in _values(member.type, member.default):
        spelling = text(value)
        if isinstance(value, enum.Enum):
            _, _, spelling = spelling.rpartition(".")
        spellings.append(spelling)
    return spellings


def _changed_field(
    names: Iterable[str], base: Mapping[str, Any], others: Collection[Mapping[str, Any]]
) -> str | None:
    """Return the first of these fields that has another value in any of the others, None if there is none."""
    for name in names:
        if any(fields[name] != base[name] for fields in others):
            return name
    return None


def _in_environment(
    target: Any, variables: Mapping[str, str], read: dict[str, Any]
) -> dict[str, Any]:
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


def _json_keys_by_field(
    becomes: Callable[[Any], Mapping[str, Any]], target: Any
) -> dict[str, tuple[str, ...]]:
    """Return, for each field, the keys of DeepSpeed's JSON that other values of it change."""
    try:
        base = dict(_leaves("ds_config", becomes(target())))
    except ImportError:
        return {}  # without DeepSpeed
    keys_by_field = {}
    for member in _members(target):
        changed: dict[str, None] = {}
        for value in _values(member.type, member.default):
            # Not every value fits the other fields' defaults.
            with contextlib.suppress(Exception):
                made = target(**{member.name: value})
                for key, leaf in _leaves("ds_config", becomes(made)):
                    if leaf != base.get(key):
                        changed[key] = None
        keys_by_field[member.name] = tuple(changed)
    return keys_by_field


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the full name and the value of all that is no mapping itself in a nested mapping."""
    if not isinstance(value, Mapping):
        return
    for key, member in value.items():
        if isinstance(member, Mapping):
            yield from _leaves(f"{name}.{key}", member)
        else:
            yield f"{name}.{key}", member


def _members(target: Any) -> Iterator[_Member]:
    """Yield the fields of a dataclass, a pydantic model, or a signature."""
    if hasattr(target, "model_fields"):
        yield from _model_members(target)
    else:
        yield from _parameters(target)


def _model_members(model: Any) -> Iterator[_Member]:
    """Yield the fields of a pydantic model; for a field that is a model itself, the fields of that."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        nested_models = [part for part in _parts(field.annotation) if hasattr(part, "model_fields")]
        if nested_models:
            for member in _members(nested_models[0]):
                yield dataclasses.replace(member, name=f"{key}.{member.name}")
        else:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            yield _Member(key, field.annotation, default, _limits_test(field))


def _parameters(target: Any) -> Iterator[_Member]:
    """Yield the parameters of a dataclass, class or function."""
    annotated = target
    if isinstance(target, type) and not dataclasses.is_dataclass(target):
        annotated = vars(target).get("__init__", target)
    hints = _hints(annotated)
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from _taken_out(target, parameter.name)
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        default = None if parameter.default is parameter.empty else parameter.default
        yield _Member(parameter.name, hints.get(parameter.name, type(default)), default)


def _taken_out(target: Any, keywords: str) -> Iterator[_Member]:
    """Yield the parameters that a function takes out of its further keywords: ``kwargs.pop("name", default)``."""
    try:
        source = inspect.getsource(target)
    except (OSError, TypeError):
        return
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != f"{keywords}.pop":
            continue
        name, *rest = node.args
        # In a loop over names it takes out what is obsolete; what begins with an underscore is the
        # library's own.
        if not isinstance(name, ast.Constant) or str(name.value).startswith("_"):
            continue
        default = rest[0].value if rest and isinstance(rest[0], ast.Constant) else None
        yield _Member(str(name.value), type(default), default)


def _limits_test(field: Any) -> Callable[[Any], bool]:
    """Return a test whether a value is within the limits of a pydantic field."""
    limits: list[tuple[Callable[[Any, Any], bool], Any]] = []
    for constraint in field.metadata:
        names = [name for name in _LIMITS if hasattr(constraint, name)]
        limits += [(getattr(operator, name), getattr(constraint, name)) for name in names]
    return lambda value: all(compare(value, limit) for compare, limit in limits)


def _hints(target: Any) -> dict[str, Any]:
    """Return the resolved annotations; those that cannot be resolved here stay texts."""
    try:
        return typing.get_type_hints(target)
    except Exception:
        hints = dict(getattr(target, "__annotations__", {}))
        namespace = {**vars(builtins), **vars(typing), **vars(sys.modules[target.__module__])}
        for name, annotation in hints.items():
            if isinstance(annotation, str):
                with contextlib.suppress(Exception):
                    hints[name] = eval(annotation, namespace)  # noqa: S307 - an installed library's annotation
        return hints


def _parts(kind: Any) -> list[Any]:
    """Return the members of a union, else the type itself."""
    if isinstance(kind, typing.ForwardRef):
        try:
            return [pkgutil.resolve_name(kind.__forward_arg__)]
        except (ImportError, AttributeError, ValueError):
            return [kind]
    if typing.get_origin(kind) not in {typing.Union, types.UnionType}:
        return [kind]
    parts = []
    for member in typing.get_args(kind):
        parts += _parts(member)
    return parts


def _values(kind: Any, default: Any) -> list[Any]:
    """Return the values to try for a type; none where the type does not say."""
    values: list[Any] = []
    for part in _parts(kind):
        values += _values_of_part(part, default)
    # None beside nothing that can be derived is the default of most such fields, and says nothing
    # alone.
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
    if part is str and str(default).lower() in {"true", "false"}:
        return (True, False)
    if getattr(part, "__qualname__", "") == "dtype":
        torch = sys.modules["torch"]
        return (torch.float32, torch.bfloat16, torch.float16)
    return ()


def text(value: Any) -> str:
    """Return a value as a setting spells it: JSON, or the import path of an enumeration's member or a dtype."""
    if isinstance(value, enum.Enum) and not isinstance(value, (str, int)):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    if isinstance(value, enum.Enum):
        value = value.value
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
        if self.read.get(key) is None:
            self.read[key] = default
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


def _keys(reader: _ConfigReader) -> Iterator[_Member]:
    """Yield the keys that the function reads from a dictionary, and those that it reads from dictionaries inside."""
    read: dict[str, Any] = {}
    _call(reader, _Recorder({}, read))
    for key, default in list(read.items()):
        inner_keys: dict[str, Any] = {}
        if default is None or isinstance(default, dict):
            model = _model_of_key(reader, key)
            if model is not None:
                for member in _members(model):
                    yield dataclasses.replace(member, name=f"{key}.{member.name}")
                continue
            _call(reader, {key: _Recorder({"enabled": True}, inner_keys)})
        if not inner_keys:
            yield _Member(key, type(default), default)
        for inner_key, inner_default in inner_keys.items():
            yield _Member(f"{key}.{inner_key}", type(inner_default), inner_default)


def _model_of_key(reader: _ConfigReader, key: str) -> Any:
    """Return the pydantic model that the function makes of what stands under a key, None if it makes none."""
    error = _call(reader, {key: {_UNKNOWN_KEY: 1}})
    model = _model_named(getattr(error, "title", ""))
    if model is None:
        return None
    # One model may hold several keys (DeepSpeed's monitors): the place of the error says which.
    for outer in error.errors()[0]["loc"][:-1]:  # type: ignore[union-attr]
        model = model.model_fields[outer].annotation
    return model


def _call(reader: _ConfigReader, config: dict[str, Any]) -> Exception | None:
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

    models: list[Any] = [BaseModel]
    # The list grows while it is read, until no subclass of a subclass is left.
    for model in models:
        if model.__name__ == name:
            return model
        models += model.__subclasses__()
    return None
