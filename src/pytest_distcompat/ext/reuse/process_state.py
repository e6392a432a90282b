"""Process-wide state that a test may change: environment, signal handlers, limits and the like.

Reused ranks compare it before and after each test, because the next test would see the change.
"""

from __future__ import annotations

import atexit
import builtins
import codecs
import contextlib
import contextvars
import copy
import copyreg
import ctypes
import faulthandler
import functools
import gc
import json
import locale
import logging
import math
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil

from pytest_distcompat.excerpt import encodable
from pytest_distcompat.ext.reuse.library_state import SETTINGS, SINGLETONS, Registered
from pytest_distcompat.launch.process import children
from pytest_distcompat.launch.unimported import loaded

#: How much more a rank may use than at its beginning before it ends; memory in bytes. What a
#: library opens once is no leak.
_LIMITS = {"memory": 256 * 2**20, "native threads": 32, "open files": 128, "child processes": 0}

_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
#: ``signal.getsignal`` makes an enum of each result if it can, which would take a third of the time
#: of a comparison.
_handler = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_RESOURCES = tuple(
    [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
)
#: The names of the items of lists.
_LABELS = {
    # Most real-time signals have no name, and are numbers.
    "signal handlers": [getattr(number, "name", str(number)) for number in _SIGNALS],
    "resource limits": [name for name in vars(resource) if name.startswith("RLIMIT_")],
}
#: How many items are named, and how many characters of a value are shown.
_ITEMS_NAMED, _VALUE_LENGTH = 3, 40
#: The modules whose functions tests replace most often.
_PATCHED = (builtins, os, time)
_ALSO_PATCHED = (copy, json, math, pickle, random, shutil, socket, subprocess)
#: The levels for which logging has names of its own.
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
#: Python's own handlers for text that does not fit its encoding.
_ERROR_HANDLERS = (
    "strict",
    "ignore",
    "replace",
    "xmlcharrefreplace",
    "backslashreplace",
    "namereplace",
)
#: prctl(2): the signal at the parent's death, for which torch.multiprocessing has a function; the
#: name, which setproctitle sets; whether orphans come to this process, as a test that watches its
#: children may have it. No library sets the others.
_GET_PDEATHSIG, _GET_NAME, _GET_CHILD_SUBREAPER = 2, 16, 37
_libc = ctypes.CDLL(None)


def state_now() -> dict[str, Any]:
    """Return the state of this process that must be the same after a test as before it, by name."""
    return {
        **_state_in_the_kernel(),
        **_state_of_python(),
        **_state_of_libraries(),
        # Last, because reading the context of decimal numbers makes one.
        "context variables": contextvars.copy_context(),
    }


def _state_in_the_kernel() -> dict[str, Any]:
    """Return what the kernel and the C library keep for this process."""
    return {
        "the environment": dict(os.environ),
        "the working directory": _working_directory(),
        "the file mode mask": _file_mode_mask(),
        "sys.path": list(sys.path),
        "signal handlers": list(map(_handler, _SIGNALS)),
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "the file that signals wake up": _wakeup_descriptor(),
        # The remaining time is less each time.
        "timers": [any(signal.getitimer(timer)) for timer in _TIMERS],
        "resource limits": list(map(resource.getrlimit, _RESOURCES)),
        "user, group and session": (
            os.getresuid(),
            os.getresgid(),
            os.getgroups(),
            os.getpgid(0),
            os.getsid(0),
        ),
        "prctl settings": _kernel_settings(),
        "the CPUs it may use": (
            os.sched_getaffinity(0),
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getscheduler(0),
            os.sched_getparam(0).sched_priority,
            _process(os.getpid()).ionice(),
        ),
    }


def _state_of_python() -> dict[str, Any]:
    """Return what the interpreter and the standard library keep."""
    state: dict[str, Any] = {
        "the standard streams": (sys.stdin, sys.stdout, sys.stderr, _descriptors()),
        "threads": set(threading.enumerate()),
        "garbage collection": (
            gc.isenabled(),
            gc.get_threshold(),
            gc.get_debug(),
            list(gc.callbacks),
            _has_frozen_objects(),
        ),
        "import hooks": (list(sys.meta_path), list(sys.path_hooks)),
        "the interpreter's settings": _interpreter(),
        "warning filters": list(warnings.filters),
        "functions of warnings": (warnings.showwarning, warnings.formatwarning),
        "the default time limit of sockets": socket.getdefaulttimeout(),
        "how text is encoded that does not fit": list(map(codecs.lookup_error, _ERROR_HANDLERS)),
        "how objects are pickled": Registered(copyreg.dispatch_table),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the time zone": (time.tzname, time.timezone),
        "builtins, os or time": [tuple(vars(module).values()) for module in _PATCHED],
        "functions of the standard library": [
            tuple(vars(module).values()) for module in _ALSO_PATCHED
        ],
        "what is to be done at exit": _at_exit(),
        "multiprocessing's start method": multiprocessing.get_start_method(allow_none=True),
        "multiprocessing's interpreter": multiprocessing.spawn.get_executable(),
        "the directory of temporary files": tempfile.tempdir or _first_of_temporaries(),
        "logging": (
            logging.root.level,
            list(logging.root.handlers),
            logging.root.manager.disable,
            logging.lastResort,
            logging.raiseExceptions,
            logging.getLoggerClass(),
            logging.getLogRecordFactory(),
            *map(logging.getLevelName, _LEVELS),
        ),
        "loggers": _Loggers(),
    }
    # torch sets its own hook with each process group, and leaves it.
    if not str(getattr(sys.excepthook, "__module__", "")).startswith("torch."):
        state["sys.excepthook"] = sys.excepthook
    return state


def _state_of_libraries() -> dict[str, Any]:
    """Return the settings and singletons of the libraries that are loaded."""
    state: dict[str, Any] = {}
    for name, (module_name, read) in SETTINGS.items():
        # A library that is hidden from this rank has its first settings: a test that imports it may
        # change them at once.
        module = loaded(module_name)
        if module is not None:
            state[name] = _read(read, module)
    for name, (module_name, read) in SINGLETONS.items():
        if module_name in sys.modules:
            state[name] = _read(read, sys.modules[module_name])
    return state


def changes(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return what differs from the state ``before``, each with the part of it that changed.

    The state of a library that was imported meanwhile is added to ``before``.
    """
    # The first settings of such a library are unknown. But its singletons did not exist.
    expected = {**now, **dict.fromkeys(SINGLETONS, False), **before}
    for name, value in now.items():
        before.setdefault(name, value)
    descriptions = []
    for name, value in now.items():
        if value == expected[name]:
            continue
        labels = _LABELS.get(name, ())
        descriptions.append(described(name, expected[name], value, labels))
    return descriptions


def described(name: str, was: Any, now: Any, labels: Sequence[str] = ()) -> str:
    """Return ``name`` and, where possible, what of it has changed.

    For example ``the environment (FOO set to 'x')``.

    ``labels`` are what the items are called where both are lists of as many items.
    """
    differences = _differences(was, now, labels)
    if not differences:
        return name
    text = ", ".join(differences[:_ITEMS_NAMED])
    if len(differences) > _ITEMS_NAMED:
        text += f" and {len(differences) - _ITEMS_NAMED} more"
    return encodable(f"{name} ({text})")


def _differences(was: Any, now: Any, labels: Sequence[str]) -> list[str]:
    """Return what of a value has changed; empty if it has no parts that can be named."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        return list(_changed_keys(was, now))
    if labels and len(was) == len(now) == len(labels):
        changed = []
        for label, old, new in zip(labels, was, now, strict=True):
            if old != new:
                changed.append(label)
        return changed
    if _are_both(was, now, (set, frozenset, list)):
        return [*_named_items("", now, was), *_named_items("no more ", was, now)]
    if _are_both(was, now, (str, int)) and not isinstance(now, bool):
        return [f"{_cut(now)} instead of {_cut(was)}"]
    return []


def _are_both(was: object, now: object, types: tuple[type, ...]) -> bool:
    return isinstance(was, types) and isinstance(now, types)


def _changed_keys(was: Mapping[Any, Any], now: Mapping[Any, Any]) -> Iterator[str]:
    # Keys of different types may have no order.
    for key in sorted({*was, *now}, key=str):
        name = key.__name__ if isinstance(key, type) else key
        if key not in now:
            yield f"{name} removed"
        elif key not in was or was[key] != now[key]:
            yield f"{name} set to {_cut(now[key])}"


def _named_items(prefix: str, items: Any, others: Any) -> Iterator[str]:
    """Yield the items that are not among the others and have a name.

    The address of any other object says nothing.
    """
    for item in items:
        if item in others:
            continue
        if isinstance(item, threading.Thread):
            yield prefix + item.name
        elif isinstance(item, (str, int)):
            yield prefix + _cut(item)


def _cut(value: object) -> str:
    # A number of an enum is shown as the number.
    text = repr(int(value) if isinstance(value, int) else value)
    if len(text) <= _VALUE_LENGTH:
        return text
    return f"{text[:_VALUE_LENGTH]}..."


def sizes() -> dict[str, int]:
    """Return sizes that may grow in the run of this process, but not beyond a limit."""
    own = _process(os.getpid())
    return {
        "memory": own.memory_info().rss,
        "native threads": own.num_threads(),
        "open files": own.num_fds(),
        "child processes": len(children(os.getpid())),
    }


def grown(first: Mapping[str, int]) -> list[str]:
    """Return the names of what has grown too much since the sizes were those."""
    names = []
    for name, size in sizes().items():
        if size - first[name] > _LIMITS[name]:
            names.append(name)
    return names


def _read(read: Callable[[Any], object], module: Any) -> object:
    """Return what ``read`` returns for the module, or the type of its error.

    A test may have left a mode, or a function of its own, with which every call of torch raises.
    """
    try:
        return read(module)
    except Exception as error:
        return type(error)


def _has_frozen_objects() -> bool:
    """Tell whether there are objects that garbage collection passes over.

    A fork server has them.

    Python counts them one by one: 40 ms in a rank that has transformers imported. Those that a test
    releases are among the others afterwards, of which a rank has few.
    """
    frozen = _frozen_at_first()
    if frozen:
        return len(gc.get_objects()) < frozen
    return bool(gc.get_freeze_count())


@functools.cache
def _frozen_at_first() -> int:
    """Return how many frozen objects this process had when it was asked first."""
    return gc.get_freeze_count()


def _working_directory() -> str:
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()  # noqa: PTH109 - a Path would take longer than the whole comparison
    return ""


def _first_of_temporaries() -> str:
    """Return the directory that ``tempfile`` takes at its first use.

    To call ``tempfile.gettempdir`` would fix that directory, which then no longer followed
    ``TMPDIR``.
    """
    directory = "/tmp"  # noqa: S108 - as tempfile has it
    for name in ("TMPDIR", "TEMP", "TMP"):
        if os.environ.get(name):
            directory = os.environ[name]
            break
    return os.path.abspath(directory)  # noqa: PTH100 - as tempfile has it


def _wakeup_descriptor() -> int:
    """Return the file descriptor to which signals are written.

    Only setting it reads it, in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return -1
    number = signal.set_wakeup_fd(-1)
    if number != -1:
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(number)
    return number


def _file_mode_mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


#: The process of that number; a fork has another number.
_process = functools.cache(psutil.Process)


def _descriptors() -> list[tuple[int, int] | None]:
    """Return the files of the first three file descriptors."""
    files: list[tuple[int, int] | None] = [None, None, None]
    for descriptor in range(3):
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            files[descriptor] = status.st_dev, status.st_ino
    return files


def _interpreter() -> tuple[object, ...]:
    """Return the settings of ``sys``, ``threading`` and the like for all of Python."""
    settings: list[object] = [
        sys.gettrace(),
        sys.getprofile(),
        threading.gettrace(),
        threading.getprofile(),
        sys.getrecursionlimit(),
        sys.getswitchinterval(),
        sys.getdlopenflags(),
        sys.unraisablehook,
        sys.displayhook,
        threading.excepthook,
        sys.breakpointhook,
        # Python 3.10 has the function from 3.10.7 on.
        getattr(sys, "get_int_max_str_digits", int)(),
        sys.get_asyncgen_hooks(),
        sys.get_coroutine_origin_tracking_depth(),
        sys.dont_write_bytecode,
        sys.pycache_prefix,
        sys.executable,
        list(sys.argv),
        sys.__stdin__,
        sys.__stdout__,
        sys.__stderr__,
        getattr(sys, "tracebacklimit", None),
        _stack_size(),
        faulthandler.is_enabled(),
        tracemalloc.is_tracing(),
    ]
    # Python 3.12 has it.
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring:
        settings.append([monitoring.get_tool(number) for number in range(6)])
    return tuple(settings)


def _stack_size() -> int:
    """Return the stack size of new threads. Only setting it reads it."""
    size = threading.stack_size()
    if size:
        threading.stack_size(size)
    return size


def _kernel_settings() -> list[object]:
    """Return what prctl set for this process.

    That is the signal at its parent's death, whether orphans come to it, and its name.
    """
    settings: list[object] = []
    for option in (_GET_PDEATHSIG, _GET_CHILD_SUBREAPER):
        _libc.prctl(option, ctypes.byref(_prctl_number))
        settings.append(_prctl_number.value)
    _libc.prctl(_GET_NAME, _prctl_name)
    settings.append(_prctl_name.value)
    return settings


_prctl_number, _prctl_name = ctypes.c_int(), ctypes.create_string_buffer(16)


class _Loggers:
    """The settings of each logger but the root.

    A new logger does not count as a change: its library was imported meanwhile.
    """

    def __init__(self) -> None:
        loggers = logging.root.manager.loggerDict.copy()
        self.known = loggers.keys()
        # Most loggers have no settings, and there may be hundreds: only the others are recorded.
        self.set: dict[str, tuple[object, ...]] = {}
        for name, logger in loggers.items():
            if isinstance(logger, logging.PlaceHolder):
                continue
            if (
                logger.level
                or logger.handlers
                or logger.filters
                or logger.disabled
                or not logger.propagate
            ):
                self.set[name] = (
                    logger.level,
                    logger.propagate,
                    logger.disabled,
                    *logger.filters,
                    *logger.handlers,
                )

    def __eq__(self, before: object) -> bool:
        if not isinstance(before, _Loggers):
            return False
        for name in self.set.keys() | before.set.keys():
            if name not in before.known:
                continue
            if self.set.get(name) != before.set.get(name):
                return False
        return True

    def __hash__(self) -> int:
        return id(self)


def _at_exit() -> tuple[int, int]:
    """Return how many functions wait for the end of the interpreter, and of its process.

    The latter are those of multiprocessing, of which a rank is a process. Such functions belong to
    the test that registered them. The standard library has only private names for
    them; ``tests/launch/test_private_names.py`` fails when these go away.
    """
    registry: Any = multiprocessing.util._finalizer_registry  # type: ignore[attr-defined]  # noqa: SLF001
    return atexit._ncallbacks(), len(registry)  # noqa: SLF001
