"""Calls of a live trainer, as text and as declared methods: what walks draw."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import itertools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
#: How the action of a walk begins that is a call of the live trainer, and that of its reference.
CALL, REFERENCE_CALL = "call ", "reference "
#: How the name of a walk's run begins. One of Trainer's may have steps alone, which no action tells from a plain training.
WALK = "walk-"
#: The call that saves, and goes on in a new process group.
RESUME = "resume"


@dataclass(frozen=True)
class Call:
    """One call, with the arguments that are not at their default; ``str(call)`` is as Python writes it."""

    name: str
    arguments: tuple[tuple[str, str | bool], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments)})"

    @classmethod
    def parse(cls, text: str) -> Call:
        """Return the call that ``str`` wrote. Raises ValueError for another text."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            tree = None
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
            raise ValueError(f"{text!r} is no call; one reads like step(clip='no')")
        return cls(tree.func.id, tuple((str(one.arg), ast.literal_eval(one.value)) for one in tree.keywords))


def training(method: Method) -> Method:
    """Declare a method of a ``Calls`` as a call that trains, or changes how the trainer goes on."""
    method.kind = "training"  # type: ignore[attr-defined]  # functions take attributes
    return method


def observer(method: Method) -> Method:
    """Declare a method of a ``Calls`` as a call that must change nothing.

    It may return what is compared with the reference: a tensor of outputs, a model, or tensors by the names of parameters,
    whole or this rank's part.
    """
    method.kind = "observer"  # type: ignore[attr-defined]  # see above
    return method


def kind_of(calls: type, name: str) -> str:
    """Return what a method is declared as, by the class or by one that it overrides; empty for one that is no call."""
    declared = (getattr(vars(base).get(name), "kind", "") for base in calls.__mro__)
    return next(filter(None, declared), "")


def offered(calls: type) -> list[Call]:
    """Return all declared methods, each with all its arguments: those with defaults first, which are left out of a call."""
    found: list[Call] = []
    for name in sorted(name for name in dir(calls) if kind_of(calls, name)):
        method = getattr(calls, name)
        hints, defaults = typing.get_type_hints(method), method.__defaults__ or ()
        arguments = dict(zip(method.__code__.co_varnames[1:], defaults, strict=False))
        values = {one: (typing.get_args(hints[one]) or (False, True)) for one in arguments}
        ordered = [[arguments[one], *(value for value in values[one] if value != arguments[one])] for one in arguments]
        for chosen in itertools.product(*ordered):
            given = zip(arguments, chosen, strict=True)
            found.append(Call(name, tuple((one, value) for one, value in given if value != arguments[one])))
    return found


def read_calls(text: str, calls: type) -> list[Call]:
    """Return the calls of a walk, as ``offered`` has them. Raises ValueError for a text that is none.

    Args:
        text: ``step(), micro(), step(clip='no')``.
        calls: The class that declares them.
    """
    try:
        trees = ast.parse(f"[{text}]", mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is no list of calls; one reads like step(), step(clip='no')") from None
    every, found = offered(calls), []
    for tree in trees.elts if isinstance(trees, ast.List) else [trees]:
        call = Call.parse(ast.unparse(tree))
        known = [one for one in every if one.name == call.name]
        if not known:
            names = ", ".join(dict.fromkeys(one.name for one in every))
            raise ValueError(f"{call}: no such call. Known: {names}")
        defaults = inspect.signature(getattr(calls, call.name)).parameters
        given = {
            name: value for name, value in call.arguments if name not in defaults or value != defaults[name].default
        }
        same = next((one for one in known if dict(one.arguments) == given), None)
        if same is None:
            raise ValueError(f"{call}: no such arguments. Known: {', '.join(map(str, known))}")
        found.append(same)
    return found


def refused(calls: Any, strategy: str) -> dict[Call, str]:
    """Return the calls that a driver does not have under a strategy, as its ``refused`` says, each with the reason."""
    patterns: Mapping[str, str] = {**calls.refused.get("*", {}), **calls.refused.get(strategy, {})}
    found = {}
    for call in offered(calls):
        reasons = (why for pattern, why in patterns.items() if fnmatch.fnmatchcase(str(call), pattern))
        if reason := next(reasons, ""):
            found[call] = reason
    return found
