"""Fields of the objects that a driver configures its libraries with.

They are read from the installed releases.
"""

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
#: Compares a value with a limit.
_Comparison = Callable[[Any, Any], bool]


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
        only: The names of the fields that are meant; empty for all.
    """

    name: str
    target: str
    strategies: tuple[str, ...]
    kind: str = "fields"
    precision: str = "fp32"
    becomes: str = ""
    only: tuple[str, ...] = ()

    def names(self, setting: str, strategy: str) -> bool:
        """Tell whether a setting is one of this object, or of DeepSpeed's JSON if that comes of it.

        Args:
            setting: The full name of a setting, also with its value.
            strategy: A strategy; under ZeRO the object becomes JSON, if it does.
        """
        if self.becomes and strategy.startswith("zero") and setting.startswith("ds_config."):
            return True
        if self.kind == "subclasses":
            return False
        prefix = "env" if self.kind == "environment" else self.name
        name, _, _ = setting.partition("=")
        owner, _, field = name.partition(".")
        return owner == prefix and self.means(field)

    def means(self, field: str) -> bool:
        """Tell whether a field is one of those that are meant."""
        return not self.only or field in self.only


@dataclass(frozen=True)
class Field:
    """A field of a source.

    Attributes:
        name: Its full name.
        type: Its type, as text.
        default: Its default, as text.
        values: Other values than the default, as text.
        strategies: The strategies under which the driver makes the source.
        precision: The precision under which it matters.
        places: The full names of other settings that say the same.
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
    """Return the fields of all sources, whose libraries it imports.

    A library that is not installed has none.
    """
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
    """Yield the fields of a source, as its kind says."""
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
    """Yield the fields of a class or function.

    Each has the keys of DeepSpeed's JSON that come of it as other places.
    """
    places: dict[str, tuple[str, ...]] = {}
    if source.becomes:
        places = _json_keys_by_field(pkgutil.resolve_name(source.becomes), target)
    for field in _fields(source, _members(target)):
        name = field.name.removeprefix(f"{source.name}.")
        yield dataclasses.replace(field, places=places.get(name, ()))


def _fields(source: Source, members: Iterable[_Member]) -> Iterator[Field]:
    """Yield the members of a source as fields with the values to try."""
    for member in members:
        if not source.means(member.name):
            continue
        yield Field(
            f"{source.name}.{member.name}",
            _type_name(member.type),
            text(member.default),
            _other_spellings(member),
            source.strategies,
            source.precision,
        )


def _type_name(kind: Any) -> str:
    """Return a type or annotation as text."""
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
    """Yield the environment variables that change a field of what ``target`` makes.

    Each has the values that ``target`` accepts.
    """
    spellings_by_field: dict[str, list[str]] = {}
    all_spellings: dict[str, None] = {}
    for member in _members(target):
        spellings = _variable_spellings(member)
        spellings_by_field[member.name] = spellings
        all_spellings.update(dict.fromkeys(spellings))
    # The first time, the variables of what it imports are read too.
    _in_environment(target, {}, {})
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
        accepted = []
        for spelling in dict.fromkeys(spellings_by_field[changed]):
            if spelling in made_by_spelling and spelling != "null":
                accepted.append(spelling)
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
    """Return the values to try as an environment variable has them.

    Of an enumeration's member that is the name alone.
    """
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
    """Return the first field that has another value in any of the others; None if none has.

    Args:
        names: Names of fields.
        base: Value by field.
        others: The same of other objects.
    """
    for name in names:
        if any(fields[name] != base[name] for fields in others):
            return name
    return None


def _in_environment(
    target: Any, variables: Mapping[str, str], read: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of what is made with some environment variables, by name.

    Args:
        target: It is called without arguments.
        variables: The variables that are set meanwhile.
        read: Gets the variables that ``target`` reads, with their defaults.

    Returns:
        Nothing if ``target`` raises.
    """
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
    """Return for each field the keys of DeepSpeed's JSON that other values of it change.

    Args:
        becomes: Returns the JSON of what ``target`` makes.
        target: What has the fields.
    """
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
    """Yield the fields of a pydantic model; of a field that is a model itself, its fields."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        parts = _parts(field.annotation)
        nested_models = [part for part in parts if hasattr(part, "model_fields")]
        if nested_models:
            for member in _members(nested_models[0]):
                full_name = f"{key}.{member.name}"
                yield dataclasses.replace(member, name=full_name)
            continue
        default = None
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
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
        kind = hints.get(parameter.name, type(default))
        yield _Member(parameter.name, kind, default)


def _taken_out(target: Any, keywords: str) -> Iterator[_Member]:
    """Yield the parameters that a function takes out of its further keywords.

    Its source has ``kwargs.pop("name", default)``.

    Args:
        target: The function.
        keywords: How it names its further keywords, such as ``kwargs``.
    """
    try:
        source = inspect.getsource(target)
    except (OSError, TypeError):
        return
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) != f"{keywords}.pop":
            continue
        name_node, *further_nodes = node.args
        # In a loop over names it takes out what is obsolete.
        if not isinstance(name_node, ast.Constant):
            continue
        name = str(name_node.value)
        # What begins with an underscore is the library's own.
        if name.startswith("_"):
            continue
        default: Any = None
        if further_nodes and isinstance(further_nodes[0], ast.Constant):
            default = further_nodes[0].value
        yield _Member(name, type(default), default)


def _limits_test(field: Any) -> Callable[[Any], bool]:
    """Return a test whether a value is within the limits of a pydantic field."""
    limits: list[tuple[_Comparison, Any]] = []
    for constraint in field.metadata:
        for name in _LIMITS:
            if hasattr(constraint, name):
                limits.append((getattr(operator, name), getattr(constraint, name)))
    return lambda value: all(compare(value, limit) for compare, limit in limits)


def _hints(target: Any) -> dict[str, Any]:
    """Return the resolved annotations; those that cannot be resolved here stay texts."""
    try:
        return typing.get_type_hints(target)
    except Exception:
        hints = dict(getattr(target, "__annotations__", {}))
        module = sys.modules[target.__module__]
        namespace = {**vars(builtins), **vars(typing), **vars(module)}
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
    """Return a value as a setting spells it.

    It is JSON, or the import path of an enumeration's member or a dtype.
    """
    if isinstance(value, enum.Enum) and not isinstance(value, (str, int)):
        kind = type(value)
        return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
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
    """Yield the keys that a function reads from a dictionary and from dictionaries inside it."""
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
    """Return the pydantic model that the function makes of what is under a key; None if none."""
    error = _call(reader, {key: {_UNKNOWN_KEY: 1}})
    model = _model_named(getattr(error, "title", ""))
    if model is None:
        return None
    # One model may hold several keys (DeepSpeed's monitors): the place of the error says which.
    for outer in error.errors()[0]["loc"][:-1]:  # type: ignore[union-attr]
        model = model.model_fields[outer].annotation
    return model


def _call(reader: _ConfigReader, config: dict[str, Any]) -> Exception | None:
    """Return the exception with which the function ends; None if it returns.

    It may well raise, without a whole config: by then it has read what it reads.
    """
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
