"""Watch of the user's own hooks while the fork server collects the tests.

The fork server is the process that ranks are forked from. It collects all tests once, so that ranks
need not. But ranks must not share what the user's code read meanwhile, if that would differ under
torchrun, where each rank collects by itself: the variable ``RANK``, the clock, a random number.
``launch.at_import.Watch`` finds such reads while modules are imported. This module has it look at
hooks too, such as ``pytest_configure`` in a ``conftest.py``. ``rank_session.collect`` calls
``watch_hooks`` as soon as the pytest configuration exists.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.launch.at_import import Watch

#: Hooks that pytest calls once a session. Only in these each of the user's functions is watched by
#: itself, which also shows the files that it left open: to compare these at each call costs time.
_ONCE = frozenset(
    {
        "pytest_configure",
        "pytest_sessionstart",
        "pytest_collection",
        "pytest_collection_modifyitems",
        "pytest_collection_finish",
    }
)


def _is_lazy(mark: pytest.Mark) -> bool:
    """Tell whether a mark makes values or ids of parameters only while tests are collected.

    ``parametrize("x", (f() for ...))`` does: its generator runs the user's code in pytest's own
    hook ``pytest_generate_tests``. So does ``parametrize(..., ids=function)``. A list was made when
    the module was imported, which is watched anyway.
    """
    if mark.name != "parametrize":
        return False
    made_at_once = (list, tuple, set, frozenset, dict, range, str, type(None))
    # The second positional argument, if there is one: parametrize(argnames, argvalues).
    argvalues = (*mark.args[1:2], mark.kwargs.get("argvalues"))
    for value in (*argvalues, mark.kwargs.get("ids")):
        if not isinstance(value, made_at_once):
            return True
    return False


def watch_hooks(config: pytest.Config, watch: Watch) -> None:
    """Watch hooks of the user's own plugins, most of all of conftest.py files.

    The watch ends together with ``watch``.
    """
    hooks = _WatchedHooks(watch)
    watch.undo.callback(config.pluginmanager.add_hookcall_monitoring(hooks.before, hooks.after))


class _WatchedHooks:
    """Has ``Watch`` look at each hook call that runs a function of the user's.

    pluggy calls ``before`` and ``after`` around each call of a hook. One hook call may run inside
    another one.

    Args:
        watch: Finds what such a call reads or leaves open.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        #: An entry for each hook call that runs, the innermost last: what to undo when it has
        #: ended.
        self._running: list[contextlib.ExitStack] = []

    def before(
        self, name: str, implementations: Sequence[Any], arguments: Mapping[str, Any]
    ) -> None:
        """Begin to watch a hook call.

        Args:
            name: The name of the hook, such as ``pytest_configure``.
            implementations: pluggy's ``HookImpl`` of each function that the call will run.
            arguments: The arguments of the call, by name.
        """
        own = []
        for implementation in implementations:
            if self._is_own(implementation.function):
                own.append(implementation)
        call = contextlib.ExitStack()
        if own or self._calls_own(name, arguments):
            call.enter_context(self._watch.hook(name))
        if name in _ONCE:
            for implementation in own:
                self._watch_alone(name, implementation, call)
        self._running.append(call)

    def after(self, *_: Any) -> None:
        """End the watch of the innermost hook call."""
        self._running.pop().close()

    def _is_own(self, function: Any) -> bool:
        """Tell whether a function is the user's own code, not a library's."""
        # A function of a compiled module has no code object.
        code = getattr(inspect.unwrap(function), "__code__", None)
        return code is not None and self._watch.is_own(code.co_filename)

    def _calls_own(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Tell whether pytest's own function for that hook calls one of the user's.

        A collector class of the user's is such a case, and a mark ``_is_lazy``.
        """
        if name == "pytest_make_collect_report":
            return self._is_own(type(arguments["collector"]).collect)
        if name == "pytest_generate_tests":
            marks = arguments["metafunc"].definition.iter_markers()
            return any(_is_lazy(mark) for mark in marks)
        return False

    def _watch_alone(self, name: str, implementation: Any, call: contextlib.ExitStack) -> None:
        """Replace the function of one implementation by a watched one until the hook call ends.

        An implementation that wraps others is left alone: their code would be watched with it.
        """
        if implementation.wrapper or implementation.hookwrapper:
            return
        function = implementation.function
        call.callback(setattr, implementation, "function", function)

        def watched(*arguments: Any) -> Any:
            with self._watch.hook(name, alone=True):
                return function(*arguments)

        implementation.function = watched
