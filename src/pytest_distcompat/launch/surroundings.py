"""What of a process a test may leave changed, and the next one would see. Ranks that live on are compared by it."""

from __future__ import annotations

import atexit
import builtins
import gc
import locale
import logging
import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from pytest_distcompat.launch.process import children
from pytest_distcompat.launch.settings import SETTINGS, SINGLETONS

#: How much more memory a rank may use than at its beginning, in bytes, before it leaves.
GROWTH = 256 * 2**20
#: How many more threads of C libraries, and how many more open files. Those that a library starts once are no leak.
NATIVE_THREADS = 32
OPEN_FILES = 128

_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
#: ``signal``'s own makes an enum of each answer if it can, which would be a third of all looks together.
_handler = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITED = tuple(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))
#: Whose functions tests replace most often.
_PATCHED = (builtins, os, time)


@dataclass(frozen=True)
class Surroundings:
    """What must be the same after a test as before it, by name."""

    same: dict[str, Any]

    @classmethod
    def now(cls) -> Surroundings:
        """Of this process."""
        same: dict[str, Any] = {
            "the environment": dict(os.environ),
            "the working directory": _directory(),
            "the file mode mask": _mask(),
            "sys.path": list(sys.path),
            "signal handlers": list(map(_handler, _SIGNALS)),
            "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            # What is left of one is less each time.
            "timers": [any(signal.getitimer(timer)) for timer in _TIMERS],
            "resource limits": list(map(resource.getrlimit, _LIMITED)),
            "the CPUs it may use": (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)),
            "the standard streams": (sys.stdin, sys.stdout, sys.stderr, _descriptors()),
            "threads": set(threading.enumerate()),
            "garbage collection": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
            "the interpreter's settings": _interpreter(),
            "warning filters": list(warnings.filters),
            "the locale": locale.setlocale(locale.LC_ALL),
            "the time zone": (time.tzname, time.timezone),
            "builtins, os or time": [tuple(vars(module).values()) for module in _PATCHED],
            "what is to be done at exit": _at_exit(),
            "multiprocessing's start method": multiprocessing.get_start_method(allow_none=True),
            "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        }
        # torch puts its own there with each process group, and leaves it.
        if not str(getattr(sys.excepthook, "__module__", "")).startswith("torch."):
            same["sys.excepthook"] = sys.excepthook
        of_libraries = (*SETTINGS.items(), *SINGLETONS.items())
        same |= {name: _read(read) for name, (module, read) in of_libraries if module in sys.modules}
        return cls(same)

    def changes(self, before: Surroundings) -> list[str]:
        """The names of what is not as it was. What is of a library that was imported meanwhile, ``before`` has from now on."""
        # What its settings were at first, nobody knows. But of what is made by use there was nothing.
        then = {**self.same, **dict.fromkeys(SINGLETONS, False), **before.same}
        for name, value in self.same.items():
            before.same.setdefault(name, value)
        return [name for name, value in self.same.items() if value != then[name]]


class Sizes:
    """What may grow in the life of a process, but not beyond a limit."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._first = self._now()

    def _now(self) -> dict[str, int]:
        own = self._own
        return {
            "memory": own.memory_info().rss,
            "native threads": own.num_threads(),
            "open files": own.num_fds(),
            "child processes": len(children(os.getpid())),
        }

    def grown(self) -> list[str]:
        """The names of what has grown too much since this was made."""
        return [name for name, size in self._now().items() if size - self._first[name] > _LIMITS[name]]


def _read(read: Callable[[], object]) -> object:
    """What that says. A test may have left a mode, or a function of its own, with which torch raises whatever it is asked."""
    try:
        return read()
    except Exception as error:
        return type(error)


def _directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a Path would take longer than all that this is compared with
    except FileNotFoundError:
        return ""


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _descriptors() -> list[tuple[int, int] | None]:
    """What the first three file descriptors lead to."""
    found: list[tuple[int, int] | None] = []
    for number in range(3):
        try:
            file = os.fstat(number)
            found.append((file.st_dev, file.st_ino))
        except OSError:
            found.append(None)
    return found


def _interpreter() -> tuple[object, ...]:
    """What ``sys`` and ``threading`` have for all of Python."""
    return (
        sys.gettrace(),
        sys.getprofile(),
        threading.gettrace(),
        threading.getprofile(),
        sys.getrecursionlimit(),
        sys.getswitchinterval(),
        sys.unraisablehook,
        sys.displayhook,
        threading.excepthook,
    )


def _at_exit() -> tuple[int, int]:
    """How many functions wait for the end of the interpreter, and of a process of multiprocessing, which a rank is.

    What they do belongs to the test that left them. The standard library tells it under private names only;
    ``tests/spawn/test_private_names.py`` says when they go away.
    """
    registry: Any = multiprocessing.util._finalizer_registry  # type: ignore[attr-defined]  # noqa: SLF001
    return atexit._ncallbacks(), len(registry)  # noqa: SLF001


_LIMITS = {"memory": GROWTH, "native threads": NATIVE_THREADS, "open files": OPEN_FILES, "child processes": 0}
