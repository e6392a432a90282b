"""Process-wide state that a test may change: environment, signal handlers, limits and the like.

A reused rank is a process that runs one test after the other (``request_loop``). It calls
``state_now`` before a test and after it, and ``changes`` compares the two: the next test would see
what the first has changed. If anything differs the rank is replaced. For example a test that sets
``os.environ["FOO"] = "x"`` gives ``["the environment (FOO set to 'x')"]``, and a property of that
test's report has this text.

A state is a dict. The keys are what messages call a part of it, as ``signal handlers``. The values
are of any type, and are only compared with ``==``. ``library_state`` has the parts that belong to
torch and other libraries. ``sizes`` and ``grown`` are for what may grow, within limits.
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
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from pytest_distcompat.ext.reuse.differences import described
from pytest_distcompat.ext.reuse.library_state import SETTINGS, SINGLETONS, Registered
from pytest_distcompat.launch.process import children
from pytest_distcompat.launch.unimported import loaded

#: How much more a rank may use than at its beginning before it is replaced, by the keys of
#: ``sizes``; memory in bytes. Files and threads have a limit above 0, because what a library opens
#: once is no leak.
_LIMITS = {"memory": 256 * 2**20, "native threads": 32, "open files": 128, "child processes": 0}

_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
#: Returns the handler of a signal. It is the C function below ``signal.getsignal``, which makes an
#: enum of each result if it can: that would take a third of the time of a comparison.
_handler = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
#: The interval timers of a process (setitimer(2)).
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
#: The names of the limits in the module ``resource``, and their numbers in the same order.
_RESOURCE_NAMES = [name for name in vars(resource) if name.startswith("RLIMIT_")]
_RESOURCES = tuple([vars(resource)[name] for name in _RESOURCE_NAMES])
#: By the name of a state that is a list: what its items are called in messages.
_LABELS = {
    # Most real-time signals have no name, and are numbers.
    "signal handlers": [getattr(number, "name", str(number)) for number in _SIGNALS],
    "resource limits": _RESOURCE_NAMES,
}
#: Modules whose functions tests replace most often; a message names these.
_PATCHED = (builtins, os, time)
#: More modules whose functions tests replace.
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
#: Options of prctl(2) that read: the signal at the parent's death, for which torch.multiprocessing
#: has a function; the process's name, which setproctitle sets; whether orphaned descendants become
#: children of this process, as a test that watches its children may want. No library sets others.
_GET_PDEATHSIG, _GET_NAME, _GET_CHILD_SUBREAPER = 2, 16, 37
_libc = ctypes.CDLL(None)


def state_now() -> dict[str, Any]:
    """Return the state of this process that must be the same after a test as before it, by name.

    For example ``{"the environment": {"HOME": "/root", ...}, "threads": {...}, ...}``.
    """
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
        # Only whether a timer runs: its remaining time is less each time.
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
        # ``Registered`` and ``_Loggers`` are equal to what was before although there are new
        # entries since, as of a library that was imported.
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
    # torch sets its own hook with each process group, and leaves it. That is no change of a test's.
    if not str(getattr(sys.excepthook, "__module__", "")).startswith("torch."):
        state["sys.excepthook"] = sys.excepthook
    return state


def _state_of_libraries() -> dict[str, Any]:
    """Return the settings and singletons of the libraries that are loaded (``library_state``).

    ``SETTINGS`` and ``SINGLETONS`` have by name the module that must be imported and a function of
    it: ``{"torch's global flags": ("torch", _torch_flags), ...}``.
    """
    state: dict[str, Any] = {}
    for name, (module_name, read) in SETTINGS.items():
        # A library may be loaded but hidden until a test imports it (``unimported``). Its settings
        # are read all the same: a test that imports it may change them at once.
        module = loaded(module_name)
        if module is not None:
            state[name] = _read(read, module)
    for name, (module_name, read) in SINGLETONS.items():
        if module_name in sys.modules:
            state[name] = _read(read, sys.modules[module_name])
    return state


def changes(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return what differs from the state ``before``, each with the part of it that changed.

    A library that was imported in between has no state in ``before``. What ``now`` has of it is
    added to ``before``.

    Args:
        now: The state after a test.
        before: The state before it; it is changed.
    """
    # What each part must equal. Of a library that was imported meanwhile the first settings are
    # unknown, so those of ``now`` count as unchanged.
    expected = dict(now)
    # But its singletons did not exist before, for which their readers return False or 0.
    expected |= dict.fromkeys(SINGLETONS, False)
    # All other parts are known.
    expected |= before
    for name, value in now.items():
        before.setdefault(name, value)
    descriptions = []
    for name, value in now.items():
        if value == expected[name]:
            continue
        labels = _LABELS.get(name, ())
        descriptions.append(described(name, expected[name], value, labels))
    return descriptions


def sizes() -> dict[str, int]:
    """Return sizes that may grow while this process lives, but not beyond ``_LIMITS``."""
    own = _process(os.getpid())
    return {
        "memory": own.memory_info().rss,
        "native threads": own.num_threads(),
        "open files": own.num_fds(),
        "child processes": len(children(os.getpid())),
    }


def grown(first: Mapping[str, int]) -> list[str]:
    """Return the names of what has grown too much since ``sizes`` returned ``first``."""
    names = []
    for name, size in sizes().items():
        if size - first[name] > _LIMITS[name]:
            names.append(name)
    return names


def _read(read: Callable[[Any], object], module: Any) -> object:
    """Return what ``read`` returns for the module, or the type of its error.

    A test may have left a mode of torch (``TorchFunctionMode``), or a function of its own, with
    which every call of torch raises. The type then differs from the value before.
    """
    try:
        return read(module)
    except Exception as error:
        return type(error)


def _has_frozen_objects() -> bool:
    """Tell whether there are objects that garbage collection passes over (``gc.freeze``).

    A fork server, the process from which ranks are forked, freezes all its objects, so a rank has
    many. A test may call ``gc.unfreeze``, which makes them ordinary objects.

    Python counts frozen objects one by one: 40 ms in a rank that has transformers imported. So only
    the first call counts them. Later calls look at the number of ordinary objects, of which a rank
    has few: it exceeds the number of frozen ones only after ``gc.unfreeze``.
    """
    frozen = _frozen_at_first()
    if frozen:
        return len(gc.get_objects()) < frozen
    return bool(gc.get_freeze_count())


@functools.cache
def _frozen_at_first() -> int:
    """Return how many frozen objects this process had at the first call."""
    return gc.get_freeze_count()


def _working_directory() -> str:
    """Return the working directory; empty if it was removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()  # noqa: PTH109 - a Path would take longer than the whole comparison
    return ""


def _first_of_temporaries() -> str:
    """Return the directory that ``tempfile`` would take at its first use.

    A call of ``tempfile.gettempdir`` would fix the directory: a later change of ``TMPDIR`` would
    have no effect on a test.
    """
    directory = "/tmp"  # noqa: S108 - as tempfile has it
    for name in ("TMPDIR", "TEMP", "TMP"):
        if os.environ.get(name):
            directory = os.environ[name]
            break
    return os.path.abspath(directory)  # noqa: PTH100 - as tempfile has it


def _wakeup_descriptor() -> int:
    """Return the file descriptor to which Python writes signals; -1 if there is none.

    ``signal.set_wakeup_fd`` sets one, and returns the one before. So it is taken away and set
    again, which only the main thread may do.
    """
    if threading.current_thread() is not threading.main_thread():
        return -1
    number = signal.set_wakeup_fd(-1)
    if number != -1:
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(number)
    return number


def _file_mode_mask() -> int:
    """Return the umask. Only setting it reads it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


#: Returns the psutil object of a process number, the same at each call. A fork has another number,
#: and so another object.
_process = functools.cache(psutil.Process)


def _descriptors() -> list[tuple[int, int] | None]:
    """Return the files of stdin, stdout and stderr, as (device, inode); None for a closed one."""
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
        # Python 3.10 has the function from 3.10.7 on. Without it, ``int()`` is 0 each time.
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
    # Python has it from 3.12 on: the names of the tools at its six numbers.
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
    """Return what prctl set for this process: the three options that ``_GET_...`` name."""
    settings: list[object] = []
    for option in (_GET_PDEATHSIG, _GET_CHILD_SUBREAPER):
        _libc.prctl(option, ctypes.byref(_prctl_number))
        settings.append(_prctl_number.value)
    _libc.prctl(_GET_NAME, _prctl_name)
    settings.append(_prctl_name.value)
    return settings


#: Where prctl writes its answers.
_prctl_number, _prctl_name = ctypes.c_int(), ctypes.create_string_buffer(16)


class _Loggers:
    """The settings of each logger but the root, to be compared with those after a test.

    A logger that is new does not count as a change: its library was imported meanwhile. So
    ``after == before`` looks only at loggers that ``before`` knows.
    """

    def __init__(self) -> None:
        loggers = logging.root.manager.loggerDict.copy()
        #: The names of all loggers.
        self.known = loggers.keys()
        #: By the name of each logger that has any setting: level, propagate, disabled, filters and
        #: handlers. Most loggers have none, and there may be hundreds.
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
    """Return how many exit functions are registered: with ``atexit``, and with multiprocessing.

    A rank is a process of multiprocessing, which has finalizers of its own. Such functions belong
    to the test that registered them, and would run at the end of all tests. The standard library
    has only private names for them; ``tests/launch/test_private_names.py`` fails when these go
    away.
    """
    registry: Any = multiprocessing.util._finalizer_registry  # type: ignore[attr-defined]  # noqa: SLF001
    return atexit._ncallbacks(), len(registry)  # noqa: SLF001
