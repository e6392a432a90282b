"""Calls of a live trainer: what users call on it in any order, such as ``step(clip='no')``.

A driver is the trainer under test, as a class. Beside its fixed methods (build, step, save, load)
it may offer calls: the methods of a subclass of ``live_calls.Calls``, each declared as ``training``
or ``observer``. A *walk* makes calls in random order on several ranks and in one process, and
compares the two after each call (``ext.walk``).

This module has calls as text: ``offered`` lists what a class declares, ``read_calls`` reads what a
user types, ``Call.parse`` reads what ``str(call)`` wrote, and ``refused`` says what a driver does
not have under a strategy.

A *run* is one process group from start to end. It performs a list of *actions* by name, such as
``build`` and ``save``; a call among them is ``call step()``.
"""

from __future__ import annotations

import ast
import fnmatch
import inspect
import itertools
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
#: An action of a run that is a call begins so: ``call step()``.
CALL = "call "
#: The action begins so in the reference, the run of one process that a run with calls is compared
#: with.
REFERENCE_CALL = "reference "
#: The call that saves, and goes on in a new process group.
RESUME = "resume"


@dataclass(frozen=True)
class Call:
    """One call of the live trainer, with the arguments that are not at their default.

    ``str(call)`` is the call as Python writes it: ``step(clip='no')``.
    """

    #: The name of the method.
    name: str
    #: Name and value of each argument: ``(("clip", "no"),)``.
    arguments: tuple[tuple[str, str | bool], ...] = ()

    def __str__(self) -> str:
        arguments = [f"{name}={value!r}" for name, value in self.arguments]
        listed = ", ".join(arguments)
        return f"{self.name}({listed})"

    @classmethod
    def parse(cls, text: str) -> Call:
        """Return the call that ``str`` wrote. Raises ValueError for another text."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            tree = None
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
            raise ValueError(f"{text!r} is no call; one reads like step(clip='no')")
        arguments: dict[str, Any] = {}
        for keyword in tree.keywords:
            name = str(keyword.arg)
            if name in arguments:
                raise ValueError(f"{text!r} names {name!r} twice")
            arguments[name] = ast.literal_eval(keyword.value)
        return cls(tree.func.id, tuple(arguments.items()))


def training(method: Method) -> Method:
    """Declare a method of a ``Calls`` as a call that trains, or changes how the trainer goes on."""
    method.kind = "training"  # type: ignore[attr-defined]  # functions take attributes
    return method


def observer(method: Method) -> Method:
    """Declare a method of a ``Calls`` as a call that must change nothing.

    It may return what is compared with the reference, the same calls in one process: a tensor of
    outputs, a model, or tensors by the names of parameters, whole or this rank's part.
    """
    method.kind = "observer"  # type: ignore[attr-defined]  # see above
    return method


def kind_of(calls: type, name: str) -> str:
    """Return what a method is declared as: ``training`` or ``observer``; empty if it is no call.

    A class that overrides a declared method need not declare it again.
    """
    for base in calls.__mro__:
        kind: str = getattr(vars(base).get(name), "kind", "")
        if kind:
            return kind
    return ""


def offered(calls: type) -> list[Call]:
    """Return all calls that a class offers: each declared method with all choices of its arguments.

    ``step(clip: Literal["norm", "no"] = "norm")`` gives ``step()`` and ``step(clip='no')``: the
    default of an argument comes first, and a call leaves it out.
    """
    offers: list[Call] = []
    for name in sorted(dir(calls)):
        if kind_of(calls, name):
            offers.extend(_calls_of_method(name, getattr(calls, name)))
    return offers


def _calls_of_method(name: str, method: Callable[..., Any]) -> Iterator[Call]:
    """Yield a call for each choice of the method's arguments.

    An argument without a ``Literal`` type is a bool.
    """
    hints = typing.get_type_hints(method)
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(method).parameters.values():
        # Arguments of a call have a default. ``self`` has none, nor has a ``**more`` by which a
        # call passes arguments on to the library.
        if parameter.default is not inspect.Parameter.empty:
            defaults[parameter.name] = parameter.default
    choices: list[list[Any]] = []
    for name_of_argument, default in defaults.items():
        # ``get_args(Literal["norm", "no"])`` is ``("norm", "no")``; that of bool is empty.
        values = typing.get_args(hints[name_of_argument]) or (False, True)
        others = [value for value in values if value != default]
        choices.append([default, *others])
    for chosen in itertools.product(*choices):
        arguments: list[tuple[str, str | bool]] = []
        for (name_of_argument, default), value in zip(defaults.items(), chosen, strict=True):
            if value != default:
                arguments.append((name_of_argument, value))
        yield Call(name, tuple(arguments))


def read_calls(text: str, calls: type) -> list[Call]:
    """Return the calls in a text, as ``offered`` has them.

    Args:
        text: ``step(), micro(), step(clip='no')``.
        calls: The class that declares them.

    Raises:
        ValueError: For a text that is no list of declared calls.
    """
    try:
        trees = ast.parse(f"[{text}]", mode="eval").body
    except SyntaxError:
        raise ValueError(
            f"{text!r} is no list of calls; one reads like step(), step(clip='no')"
        ) from None
    offers = offered(calls)
    elements = trees.elts if isinstance(trees, ast.List) else [trees]
    read: list[Call] = []
    for tree in elements:
        call = Call.parse(ast.unparse(tree))
        read.append(_as_offered(call, calls, offers))
    return read


def _as_offered(call: Call, calls: type, offers: list[Call]) -> Call:
    """Return the offered call that is the same, without arguments at their defaults.

    ``offers`` is what ``offered(calls)`` returned. Raises ValueError if there is none.
    """
    same_method = [offer for offer in offers if offer.name == call.name]
    if not same_method:
        names = ", ".join(dict.fromkeys(offer.name for offer in offers))
        raise ValueError(f"{call}: no such call. Known: {names}")
    parameters = inspect.signature(getattr(calls, call.name)).parameters
    arguments: dict[str, str | bool] = {}
    for name, value in call.arguments:
        if name in parameters and value == parameters[name].default:
            continue
        arguments[name] = value
    for offer in same_method:
        if dict(offer.arguments) == arguments:
            return offer
    known = ", ".join(str(offer) for offer in same_method)
    raise ValueError(f"{call}: no such arguments. Known: {known}")


def refused(calls: Any, strategy: str) -> dict[Call, str]:
    """Return the calls that a driver does not have under a strategy -> the reason.

    ``calls`` is the driver's subclass of ``Calls``, whose ``refused`` has them by strategy and
    pattern: ``{"fsdp1": {"freeze*": "FSDP1 flattens frozen parameters with others"}}``.
    """
    reasons: dict[Call, str] = {}
    for call in offered(calls):
        reason = refusal_reason(call, calls, strategy)
        if reason:
            reasons[call] = reason
    return reasons


def refusal_reason(call: Call, calls: Any, strategy: str) -> str:
    """Return why a driver does not have a call under a strategy; empty if it has it.

    ``calls`` is the driver's subclass of ``Calls``. The reason is that of the first pattern in its
    ``refused`` that matches; patterns for all strategies (``*``) come first.
    """
    patterns: dict[str, str] = dict(calls.refused.get("*", {}))
    patterns |= calls.refused.get(strategy, {})
    for pattern, reason in patterns.items():
        if fnmatch.fnmatchcase(str(call), pattern):
            return reason
    return ""
