"""Report each use of ``os.environ``, with the code that used it.

``at_import.Watch`` uses this module while the user's modules are imported: a module with
``RANK = os.environ.get("RANK")`` at its top must not be imported before ranks are forked.
``watch_environment`` replaces the methods of ``os.environ``. Its callbacks get the name of the
variable (``"RANK"``) and a frame, from which ``environment_use`` and ``is_discarded`` tell who used
the variable and how. ``os.environ.setdefault("RANK", "0")`` as a statement is no reading: it only
makes sure that there is a value, and keeps none.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

#: A callback for the use of a variable. Its arguments are the name of the variable and the frame of
#: the code that used it. The name is empty where the whole environment is used, as by
#: ``dict(os.environ)``.
OnVariable = Callable[[str, "FrameType | None"], None]


def watch_environment(environ: Any, read: OnVariable, written: OnVariable) -> None:
    """Have ``read`` called when a variable is read, and ``written`` when one is set or removed.

    The object gets a subclass of its own class, so that code which has imported ``environ`` before
    is watched too. The caller gives it its class back to end the watch.

    Args:
        environ: ``os.environ`` or ``os.environb``.
        read: Called before each read.
        written: Called before each change.
    """
    ordinary = type(environ)

    def watched(name: str, report: OnVariable) -> Callable[..., Any]:
        """Return a method that calls ``report``, then the ordinary method of that name."""
        method = getattr(ordinary, name)

        @functools.wraps(method)
        def call(environ: Any, *arguments: Any) -> Any:
            # ``__getitem__``, ``__setitem__``, ``__delitem__`` and ``__contains__`` begin with the
            # name of a variable. The other methods are of the whole environment.
            variable = ""
            if name.endswith(("item__", "contains__")):
                variable = os.fsdecode(arguments[0])
            report(variable, caller())
            result = method(environ, *arguments)
            if name == "__reduce_ex__":
                # ``copy.copy(os.environ)`` calls this method, and makes the copy from its result:
                # a function and its arguments, of which the first is the class of the copy. A copy
                # outlives the watch, so it gets the ordinary class.
                make, (_, *state), *more = result
                return make, (ordinary, *state), *more
            return result

        return call

    methods = {}
    for name in ("__getitem__", "__contains__", "__iter__", "__len__", "__repr__", "__reduce_ex__"):
        methods[name] = watched(name, read)
    for name in ("__setitem__", "__delitem__"):
        methods[name] = watched(name, written)
    environ.__class__ = type(ordinary.__name__, (ordinary,), methods)


class EnvironmentUse(NamedTuple):
    """A call of the environment, such as ``os.environ.get("RANK")``.

    Attributes:
        by_default: Whether ``setdefault`` was called.
        caller: The frame of the code that made the call; None if there is none.
    """

    by_default: bool
    caller: FrameType | None


def environment_use(frame: FrameType | None) -> EnvironmentUse:
    """Return which code used the environment.

    ``os.environ.get`` calls ``__getitem__`` by way of ``collections.abc`` and ``os``. Their frames,
    and those of this module's replacements, are passed over.

    Args:
        frame: The frame that an ``OnVariable`` was called with.
    """
    by_default = False
    while frame is not None and frame.f_globals.get("__name__") in {
        "os",
        "collections.abc",
        __name__,
    }:
        by_default = by_default or frame.f_code.co_name == "setdefault"
        frame = frame.f_back
    return EnvironmentUse(by_default, frame)


def is_discarded(frame: FrameType | None) -> bool:
    """Tell whether that frame discards the result of the call that it is in.

    The statement ``os.environ.setdefault("RANK", "0")`` does, ``RANK = os.environ["RANK"]`` does
    not. The instruction after the call tells it.
    """
    if frame is None:
        return False
    for instruction in dis.get_instructions(frame.f_code):
        # Room for the interpreter's caches may lie between the two instructions.
        if instruction.offset > frame.f_lasti and instruction.opname != "CACHE":
            return instruction.opname == "POP_TOP"
    raise AssertionError("a function ends with an instruction that returns")


def caller() -> FrameType | None:
    """Return the frame that called the caller of this function.

    Here that is the code which used a method of ``os.environ``, perhaps another method of it.
    """
    return sys._getframe(2)  # noqa: SLF001 - documented, in spite of its name
