"""Gets fork servers ready: imports the heavy modules, calls one function, checks that they may still be forked from.

A ``Warmth`` names the modules and the function (the pytest session is collected so). A fork server must stay fit to fork: no
CUDA context and no threads.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import randomness, rank
from pytest_distcompat.launch.at_import import Watch
from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
from pytest_distcompat.launch.environment import OF_THE_AGENT
from pytest_distcompat.launch.process import native_threads, run_exit_functions
from pytest_distcompat.launch.request import extend_import_path

#: What each rank imports before it does anything: a tenth of a second each, if it is not here already. The launcher process
#: needs it too, and the fork server is forked from that.
_OF_EVERY_RANK = (
    "torch",
    "torch.distributed.elastic.multiprocessing.api",
    "multiprocessing.popen_forkserver",
    "multiprocessing.queues",
    "pytest_distcompat.launch.rank",
    "pytest_distcompat.launch.serving",
)

#: How long threads that are about to end get for it, in seconds.
SETTLED = 0.3
#: What ``call`` returned, for the ranks, which inherit it by fork.
collected: Any = None


def import_torch(late: float) -> None:
    """In the launcher process, before the fork server is forked; the others by ``late`` too."""
    _import(_OF_EVERY_RANK, late, 2)


def import_libraries(wanted: Mapping[str, Any], late: float) -> dict[str, Any]:
    """Import the modules that a Warmth names, in a fork server that is to stay fit to fork.

    Args:
        wanted: The fields of a Warmth, and the ``device``.
        late: When our parent is about to give up; what hangs is shown.

    Returns:
        Why modules are ``missing``, and why the process is ``unfit`` to be forked from.
    """
    extend_import_path(wanted["path"])
    named = wanted["named"]
    log = os.dup(2)
    missing = _import((*_OF_EVERY_RANK, *(name for name in wanted["modules"] if name not in named)), late, log)
    _restart_threads_of_numpy()
    threads = native_threads()
    if named:
        per_rank = _made_per_rank(named, late, log)
        missing |= _import([name for name in named if name not in per_rank], late, log) | per_rank
    os.close(log)
    if wanted["device"] == "cpu":
        without_shared_memory()
    _freeze()
    return {"missing": missing, "unfit": _unfit(threads)}


def _made_per_rank(names: Sequence[str], late: float, log: int) -> dict[str, str]:
    """Import modules that the user named, in a fork of this process; return which ones ranks must import themselves, and why."""
    read, write = os.pipe()
    if os.fork() == 0:
        reasons = {}
        for name in names:
            before = native_threads()
            with Watch() as watch:
                _import([name], late, log)
            found = watch.findings.reason(None, lambda variable: OF_THE_AGENT.fullmatch(variable) is not None)
            if reason := _unfit(before) or found:
                reasons[name] = reason
        with os.fdopen(write, "w", encoding="utf-8") as file:
            json.dump(reasons, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as file:
        told = file.read()
    # Who died told nothing: to import them here would end this process too.
    return dict(json.loads(told)) if told else dict.fromkeys(names, "a process that imported it died")


def import_more(names: Sequence[str], late: float) -> None:
    """Import what the session turned out to need, in the fork server of ranks that collect for themselves."""
    log = os.dup(2)
    _import(names, late, log)
    os.close(log)
    _freeze()


def collect(wanted: Mapping[str, Any], late: float) -> dict[str, Any]:
    """Call the function that a Warmth names, in a process that has imported the libraries, and keep what it returns.

    Returns:
        Why the process is ``unfit`` to be forked from, the ``error`` of the call, the ``findings`` of the watch over it, the
        ``libraries`` that ranks need which collect for themselves, and whether something is to be done when it ``leaves``.
    """
    global collected  # noqa: PLW0603 - a fork server hands things over by being forked
    module, _, function = wanted["call"].partition(":")
    status: dict[str, Any] = {"error": ""}
    # A fork ends them.
    _restart_threads_of_numpy()
    threads, before, at_exit = native_threads(), randomness.states(), atexit._ncallbacks()  # noqa: SLF001 - see surroundings
    # pytest's capture takes stderr away while it collects.
    log = os.dup(2)
    watch = Watch(wanted["own"])
    try:
        call = getattr(importlib.import_module(module), function)
        with _stack_written(late, log), watch:
            collected = call(wanted["payload"])
    except BaseException:  # a conftest may raise anything; the ranks will meet it again and report it
        status["error"] = traceback.format_exc()
    os.close(log)
    rank.start_method = multiprocessing.get_start_method(allow_none=True)
    randomness.remember_seeds(before)
    _freeze()
    findings, unfit = watch.findings, _unfit(threads)
    # Where something keeps this process from being forked from, the other one is to keep clear of it.
    libraries = watch.libraries if (findings.made or findings.reads) and not unfit else []
    leaves = finishing is not None or atexit._ncallbacks() > at_exit  # noqa: SLF001 - see surroundings
    return {
        **status,
        "unfit": unfit,
        "findings": dataclasses.asdict(findings),
        "libraries": libraries,
        "leaves": leaves,
    }


#: What ``finish`` calls first: the end of what was collected.
finishing: Callable[[], None] | None = None


def finish() -> None:
    """Do what is to be done at the end of a process that collected, and at that of its interpreter."""
    try:
        if finishing is not None:
            finishing()
    except BaseException:  # nobody is left to be told but who reads the log
        traceback.print_exc()
    run_exit_functions()


def _freeze() -> None:
    """Have all that is here stay: no collection of a rank's has to look through it again.

    Some libraries collect at every turn, and with torch, transformers and deepspeed in memory that is 0.4 s each time.
    """
    gc.collect()
    gc.freeze()


def _import(names: Sequence[str], late: float, log: int) -> dict[str, str]:
    """Import them; which could not be, and why."""
    missing = {}
    for name in names:
        try:
            with _stack_written(late, log):
                importlib.import_module(name)
        except ImportError as error:
            # Not installed, or not for this torch: whoever needs it will say so better.
            missing[name] = str(error)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return missing


def _restart_threads_of_numpy() -> None:
    """OpenBLAS ends its threads at a fork, and starts them again for the first large product, as a module may have one: that
    would be counted as a thread of that module's. https://github.com/OpenMathLib/OpenBLAS/wiki/Faq
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # numpy imports it when it is first asked for.
        importlib.import_module("numpy.random")
        square = numpy.ones((256, 256))
        square @ square


@contextlib.contextmanager
def _stack_written(late: float, log: int) -> Iterator[None]:
    """Write to that file where this process is if the block lasts until ``late``.

    The thread that waits for that is gone after the block: a fork server must have none.
    """
    faulthandler.dump_traceback_later(max(0.1, late - clock.now()), file=log)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


#: Names of threads that C libraries start, and whose they are.
_THREADS = {"jemalloc_bg_thd": "jemalloc (pyarrow has one of its own)"}


def _unfit(threads_of_libraries: Counter[str]) -> str:
    """Why this process must not be forked from, as one sentence; empty if it may."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it initialised CUDA, which does not survive a fork"
    # The thread of faulthandler's timer that was cancelled may take a moment to end.
    clock.wait_until(lambda: native_threads() <= threads_of_libraries, SETTLED, every=0.01)
    extra = native_threads() - threads_of_libraries
    if extra:
        own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
        named = [_THREADS.get(name, name) for name in extra if name != own]
        whose = f" of {' and '.join(named)}" if named else ""
        count = sum(extra.values())
        started = f"1 thread{whose}, which does" if count == 1 else f"{count} threads{whose}, which do"
        return f"it started {started} not survive a fork and may hold locks"
    return ""
