"""Optional arguments of public methods of a library, and values to try for them.

A search tries calls of a live trainer. A call such as ``export()`` may pass arguments on to a
public method of the library, ``Accelerator.save_model``; the driver says to which
(``Calls.passes_on``). ``space`` calls ``call_arguments`` when it draws a call.

Names and values are read from the source of the method; the library is not imported. From

    def save_model(self, model, safe_serialization: bool = True, max_shard_size="10GB"): ...

come the arguments ``safe_serialization`` with the value False, and ``max_shard_size`` with values
that the code compares it with.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.upstream.sweep.values import FRACTIONS, NUMBERS

#: The nodes of a syntax tree that define a function.
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Name of a type in an annotation -> values to try for an argument of that type.
_VALUES_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": NUMBERS,
    "float": FRACTIONS,
}
#: The methods of ``str`` that compare it with another text.
_TEXT_TESTS = frozenset({"endswith", "startswith"})


@dataclass(frozen=True)
class Argument:
    """An argument that has a default.

    Attributes:
        name: Its name.
        values: Values to try, other than the default.
    """

    name: str
    values: tuple[Any, ...]


@functools.cache
def arguments_of(target: str) -> tuple[Argument, ...]:
    """Return the optional arguments of a function or method for which there are values to try.

    Values are those of the argument's type, and the constants that the code compares it with.

    Args:
        target: Where the function is defined: ``module:function`` or ``module:Class.method``.
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
    """Return the optional arguments that a call passes on to a public method.

    Arguments that the call gives itself are left out: their names are in its source.

    Args:
        calls: The class whose methods are the calls of a live trainer.
        name: The name of the call: ``export``.
    """
    target = getattr(calls, "passes_on", {}).get(name)
    if not target:
        return ()
    given = _names_given(getattr(calls, name))
    arguments: list[Argument] = []
    for argument in arguments_of(target):
        if argument.name not in given:
            arguments.append(argument)
    return tuple(arguments)


def _names_given(function: Callable[..., Any]) -> set[str]:
    """Return a function's parameters, and the keywords in its calls.

    They are read from its syntax tree, in which its comments and texts name nothing.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        if isinstance(node, ast.keyword) and node.arg is not None:
            names.add(node.arg)
    return names


def _function(target: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the definition of a function or method; ``target`` as for ``arguments_of``.

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
    """Return the body of the class of that name. Raises LookupError if no statement defines it."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise LookupError(f"{name}: no such class")


def _source_file(module_name: str) -> Path:
    """Return the source file of a module of an installed package, without importing the module."""
    package, *parts = module_name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{package} is not installed")
    directory = Path(spec.submodule_search_locations[0])
    return directory.joinpath(*parts).with_suffix(".py")


def _with_defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
    """Yield (parameter, default) for each parameter that has a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    # The defaults in a syntax tree are those of the last positional parameters.
    first_default = len(positional) - len(arguments.defaults)
    with_default = positional[first_default:]
    yield from zip(with_default, arguments.defaults, strict=True)
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for parameter, default in keyword_only:
        if default is not None:
            yield parameter, default


def _typed_values(parameter: ast.arg, default: ast.expr) -> Iterator[Any]:
    """Yield values of the types in a parameter's annotation, and of the type of its default."""
    names = {type(_constant(default)).__name__}
    if parameter.annotation is not None:
        names |= set(_names(parameter.annotation))
    for name, values in _VALUES_BY_TYPE.items():
        if name in names:
            yield from values


def _names(annotation: ast.expr) -> Iterator[str]:
    """Yield the names in an annotation: ``Optional``, ``int``; also if it is written as a text."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _names(ast.parse(node.value, mode="eval").body)


def _compared_values(function: ast.AST, name: str) -> Iterator[Any]:
    """Yield the constants that a function compares the argument of that name with."""
    for node in ast.walk(function):
        sides = _compared(node)
        if not _has_argument(sides, name):
            continue
        for side in sides:
            yield from _constants(side)


def _compared(node: ast.AST) -> list[ast.expr]:
    """Return the sides of a comparison: a and b of ``a == b``, ``a in b`` or ``a.endswith(b)``.

    The result is empty for any other node.
    """
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
    """Yield the value of a constant, or the values in a tuple, list or set; None is left out."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, (bool, int, float, str)):
            yield node.value
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for element in node.elts:
            yield from _constants(element)


def _constant(node: ast.expr) -> Any:
    """Return the value of a constant expression; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value
    return None


def _equal(value: Any, other: Any) -> bool:
    """Tell whether two values have one type and are equal: 1 equals True, but is another value."""
    return type(value) is type(other) and bool(value == other)
