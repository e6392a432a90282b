"""Members: the fields of a class, a pydantic model or a function, as it declares them.

The sweep tries each field of the objects that a driver configures its libraries with, such as
``torch.optim.AdamW`` or DeepSpeed's pydantic models. ``reading.py`` calls ``members_of(target)``
for such a class or function, in the process that imports the libraries. It yields a ``Member`` for
each parameter, such as ``Member("amsgrad", bool, False)``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import inspect
import operator
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.ext.upstream.sweep.values import parts_of

#: Names of limits (at least, greater than, ...), in ``operator`` and in pydantic's metadata.
_LIMITS = ("ge", "gt", "le", "lt")
#: Compares a value with a limit.
_Comparison = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Member:
    """A field as its owner declares it.

    Attributes:
        name: Its name, with dots for what is nested: ``offload_optimizer.device``.
        type: Its type or annotation.
        default: Its default, None where it has none.
        accepts: Tells whether a value is within its limits.
    """

    name: str
    type: Any
    default: Any
    accepts: Callable[[Any], bool] = lambda _value: True


def members_of(target: Any) -> Iterator[Member]:
    """Yield the fields of a dataclass, a pydantic model, or a signature."""
    if hasattr(target, "model_fields"):
        yield from _model_members(target)
    else:
        yield from _parameters(target)


def _model_members(model: Any) -> Iterator[Member]:
    """Yield the fields of a pydantic model; of a field that is a model itself, its fields."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        parts = parts_of(field.annotation)
        nested_models = [part for part in parts if hasattr(part, "model_fields")]
        if nested_models:
            for member in members_of(nested_models[0]):
                full_name = f"{key}.{member.name}"
                yield dataclasses.replace(member, name=full_name)
            continue
        default = None
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
        yield Member(key, field.annotation, default, _limits_test(field))


def _parameters(target: Any) -> Iterator[Member]:
    """Yield the parameters of a dataclass, class or function, with their types and defaults.

    A parameter without an annotation has the type of its default.
    """
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
        yield Member(parameter.name, kind, default)


def _taken_out(target: Any, keywords: str) -> Iterator[Member]:
    """Yield the parameters that a function takes out of its further keywords.

    Its source has ``kwargs.pop("name", default)``. ``from_pretrained`` of transformers takes most
    of its arguments so; they are not in its signature.

    Args:
        target: The function.
        keywords: How it names its further keywords, such as ``kwargs``.
    """
    try:
        source = inspect.getsource(target)
    except (OSError, TypeError):
        # It is built in, or its source is not installed.
        return
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) != f"{keywords}.pop":
            continue
        name_node, *further_nodes = node.args
        # A name that is no literal: a loop over names takes out what is obsolete.
        if not isinstance(name_node, ast.Constant):
            continue
        name = str(name_node.value)
        # What begins with an underscore is the library's own.
        if name.startswith("_"):
            continue
        default: Any = None
        if further_nodes and isinstance(further_nodes[0], ast.Constant):
            default = further_nodes[0].value
        yield Member(name, type(default), default)


def _limits_test(field: Any) -> Callable[[Any], bool]:
    """Return a test whether a value is within the limits of a pydantic ``Field(ge=0)``."""
    limits: list[tuple[_Comparison, Any]] = []
    for constraint in field.metadata:
        for name in _LIMITS:
            if hasattr(constraint, name):
                limits.append((getattr(operator, name), getattr(constraint, name)))
    return lambda value: all(compare(value, limit) for compare, limit in limits)


def _hints(target: Any) -> dict[str, Any]:
    """Return the resolved annotations; those that cannot be resolved stay texts.

    Annotations are texts under ``from __future__ import annotations``. One of them that names what
    a module imports for type checkers only makes ``get_type_hints`` fail for all. Then they are
    evaluated one by one.
    """
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
