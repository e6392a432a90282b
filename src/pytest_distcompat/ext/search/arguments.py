"""Arguments of public methods: their names, and the values to try.

They are read from the source of a library, which is not imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.upstream.sweep.values import FRACTIONS, NUMBERS

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_VALUES_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": NUMBERS,
    "float": FRACTIONS,
}
#: Methods of a text that compare it with another one.
_TEXT_TESTS = frozenset({"endswith", "startswith"})


@dataclass(frozen=True)
class Argument:
    """An argument that may be left out, and values other than its default."""

    name: str
    values: tuple[Any, ...]


@functools.cache
def arguments_of(target: str) -> tuple[Argument, ...]:
    """Return the arguments with defaults of a function or method, those that have values to try.

    Values are those of the argument's type, and the constants that the code compares it with.

    Args:
        target: ``module:function`` or ``module:Class.method``, where it is defined.
    """
    function = _function(target)
    arguments: list[Argument] = []
    for parameter, default in _with_defaults(function.args):
        values = dict.fromkeys(_typed_values(parameter, default))
        for value in _compared_values(function, parameter.arg):
            values[value] = None
        default_value = _constant(default)
        others = [value for value in values if not _equal(value, default_value)]
        if others:
            arguments.append(Argument(parameter.arg, tuple(others)))
    return tuple(arguments)


def call_arguments(calls: type, name: str) -> tuple[Argument, ...]:
    """Return the arguments that a call passes on to a public method.

    Those that it gives itself are left out.

    Args:
        calls: The class with the calls of a live trainer.
        name: The name of the call.
    """
    target = getattr(calls, "passes_on", {}).get(name)
    if not target:
        return ()
    own_source = inspect.getsource(getattr(calls, name))
    arguments: list[Argument] = []
    for argument in arguments_of(target):
        if argument.name not in own_source:
            arguments.append(argument)
    return tuple(arguments)


def _function(target: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the definition of a function or method.

    Raises:
        LookupError: There is none.
    """
    module_name, _, path = target.partition(":")
    source = _source_file(module_name).read_text(encoding="utf-8")
    body = ast.parse(source).body
    *classes, name = path.split(".")
    for class_name in classes:
        body = _class_body(body, class_name)
    for node in body:
        if isinstance(node, _FUNCTION) and node.name == name:
            return node
    raise LookupError(f"{target}: no such function")


def _class_body(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Return the body of the class of that name among these statements."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise LookupError(f"{name}: no such class")


def _source_file(module_name: str) -> Path:
    """Return the file of a module below an installed package, which is not imported."""
    package, *parts = module_name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package} is not installed")
    directory = Path(spec.submodule_search_locations[0])
    return directory.joinpath(*parts).with_suffix(".py")


def _with_defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
    """Yield the parameters that have a default, each with it."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    with_default = positional[first_default:]
    yield from zip(with_default, arguments.defaults, strict=True)
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for parameter, default in keyword_only:
        if default is not None:
            yield parameter, default


def _typed_values(parameter: ast.arg, default: ast.expr) -> Iterator[Any]:
    """Yield the values of the types in an argument's annotation, or of its default's type."""
    names = {type(_constant(default)).__name__}
    if parameter.annotation is not None:
        names |= set(_names(parameter.annotation))
    for name, values in _VALUES_BY_TYPE.items():
        if name in names:
            yield from values


def _names(annotation: ast.expr) -> Iterator[str]:
    """Yield the names in an annotation, also of one that is written as a text."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _names(ast.parse(node.value, mode="eval").body)


def _compared_values(function: ast.AST, name: str) -> Iterator[Any]:
    """Yield the constants that a function compares an argument with."""
    for node in ast.walk(function):
        sides = _compared(node)
        if not _has_argument(sides, name):
            continue
        for side in sides:
            yield from _constants(side)


def _compared(node: ast.AST) -> list[ast.expr]:
    """Return what an expression compares: ``a == b``, ``a in b`` or ``a.endswith(b)``."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    if node.func.attr in _TEXT_TESTS:
        return [node.func.value, *node.args]
    return []


def _has_argument(sides: list[ast.expr], name: str) -> bool:
    """Tell whether one of these expressions is the argument of that name."""
    for side in sides:
        if isinstance(side, ast.Name) and side.id == name:
            return True
    return False


def _constants(node: ast.expr) -> Iterator[Any]:
    """Yield a constant, or those in a tuple, list or set, if they are values to try: not None."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, (bool, int, float, str)):
            yield node.value
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for element in node.elts:
            yield from _constants(element)


def _constant(node: ast.expr) -> Any:
    """Return the value of a constant; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value
    return None


def _equal(value: Any, other: Any) -> bool:
    """Tell whether two values are the same argument: 1 equals True, and is another one."""
    return type(value) is type(other) and bool(value == other)
