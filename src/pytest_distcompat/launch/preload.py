"""Prepare fork servers: import modules and collect tests, so that ranks need not.

A fork server is a process from which ranks are forked. ``server`` starts two of them in each
interpreter:

- the one of *libraries* runs ``import_libraries``: it imports torch and the like;
- the one of the *session* is a fork of it, and runs ``collect``: it imports the user's test modules
  and collects their tests. It is there only if the session has tests to run on ranks.

Both functions get a ``Warmth`` (``request``) as a dict. For example ``{"modules": ["transformers"],
"call": "...rank_session:collect", "payload": {...}, "path": [...], "own": [...], "device":
"cpu"}``: modules to import, a function that collects tests and its argument, entries of
``sys.path``, and installed files that are the user's own code. Each returns a dict, the status of
the server, which ``server`` sends to pytest's process. It says above all whether the process is
``unfit`` to be forked. A process with a CUDA context or with threads is unfit, so some imports are
kept from creating these.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import multiprocessing
import os
import sys
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_distcompat import clock, devices
from pytest_distcompat.devices import GpuFacts
from pytest_distcompat.launch import nccl, randomness, rank, unimported
from pytest_distcompat.launch.at_import import Watch
from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
from pytest_distcompat.launch.process import native_threads, run_exit_functions
from pytest_distcompat.launch.request import extend_import_path, set_import_path
from pytest_distcompat.launch.without_cuda import answer_without_cuda, postpone_nvml

#: The modules that each rank imports first. Each would take a rank a tenth of a second. The
#: launcher process needs them too, and the fork servers are forked from it.
MODULES_OF_EVERY_RANK = (
    "torch",
    "torch.distributed.elastic.multiprocessing.api",
    "multiprocessing.popen_forkserver",
    "multiprocessing.queues",
    "pytest_distcompat.launch.files",
    "pytest_distcompat.launch.rank",
)

#: The library to name in a message for a thread whose own name says little.
_LIBRARIES_BY_THREAD = {"jemalloc_bg_thd": "jemalloc (pyarrow has one of its own)"}
#: How long a cancelled thread may take to end, in seconds.
THREADS_END_TIMEOUT_S = 0.3
#: The result of ``Warmth.call``, which ranks inherit by fork: pytest's session with its tests. None
#: in a process that collected nothing.
collected: Any = None


def import_libraries(warmth: Mapping[str, Any], dump_at: float) -> dict[str, Any]:
    """Import the modules that a Warmth names, in the fork server of libraries.

    Args:
        warmth: The fields of a Warmth, the ``device`` and, for GPUs, ``gpus`` (the fields of
            GpuFacts) and ``nccl``.
        dump_at: When to write the stack of an import that hangs, by ``clock.now``. pytest's process
            gives up soon after that.

    Returns:
        A dict with the key ``unfit``: why this process must not be forked; empty if it may be.
    """
    extend_import_path(warmth["path"])
    # To ask for GPUs and for NCCL's library would start threads or open CUDA here. So pytest's
    # process has asked: ``gpus`` and ``nccl`` (path and version of each library) are its answers,
    # and the functions that would ask return them.
    if warmth["device"] != "cpu":
        libraries = []
        for known in warmth["nccl"]:
            library = nccl.Library(Path(known["path"]), tuple(known["version"]))
            libraries.append(library)
        nccl.set_libraries(libraries)
        answer_without_cuda(GpuFacts(**warmth["gpus"]))
        postpone_nvml()
    import_modules((*MODULES_OF_EVERY_RANK, *warmth["modules"]), dump_at)
    _restart_threads_of_numpy()
    # Threads that the libraries have started so far, as those of OpenBLAS, are tolerated.
    threads = native_threads()
    settle(warmth["device"])
    return {"unfit": _unfit(threads)}


def collect(warmth: Mapping[str, Any], dump_at: float) -> dict[str, Any]:
    """Collect the tests: call the function that a Warmth names, and store its result.

    It runs in the fork server of the session, a fork of the one that has imported the libraries.
    The result goes to ``collected``, where ranks that are forked from here find it.

    Args:
        warmth: As for ``import_libraries``.
        dump_at: As for ``import_libraries``.

    Returns:
        A dict with these keys.
        ``unfit``: why the process must not be forked; empty if it may be.
        ``findings``: what the user's code did at its import that ranks must do themselves
        (``import_findings.Findings`` as a dict).
        ``libraries``: the names of the libraries' modules that the tests imported. If there is a
        finding, the ranks that it concerns are forked from the other fork server and collect the
        tests themselves; that server then imports these modules for them. Else empty.
        ``leaves``: whether ``finish`` must be called when the process ends.
    """
    global collected  # noqa: PLW0603 - a fork server hands things over by being forked
    module, _, function = warmth["call"].partition(":")
    set_import_path(warmth["path"])
    if warmth["device"] != "cpu":
        devices.set_gpu_facts(GpuFacts(**warmth["gpus"]))
    # The fork has ended the threads of OpenBLAS. They are started again before they are counted, so
    # that they are not taken for threads of the user's modules.
    _restart_threads_of_numpy()
    threads = native_threads()
    # The states of Python's, numpy's and torch's random number generators.
    before = randomness.states()
    at_exit = atexit._ncallbacks()  # noqa: SLF001 - it has no public name
    watch = Watch(warmth["own"])
    # A copy of stderr, because pytest captures the original while it collects.
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as log:
        try:
            call = getattr(importlib.import_module(module), function)
            # The watch finds what must not be done before the fork, as reading RANK.
            with _stack_written(dump_at, log.fileno()), watch:
                collected = call(warmth["payload"])
        except BaseException:
            # A conftest may raise anything. The ranks run it again, and report it.
            traceback.print_exc(file=log)
    # A conftest may have set ``spawn``, say. A forked rank would have the start method by which it
    # was started itself, so ``rank`` sets this one again.
    rank.start_method = multiprocessing.get_start_method(allow_none=True)
    # If the user's modules have seeded a generator, ranks go on from that seed, as under torchrun.
    # All other generators get a state of their own on each rank.
    randomness.remember_seeds(before)
    settle(warmth["device"])
    findings = watch.findings
    unfit = _unfit(threads)
    libraries = []
    # If this process is unfit, one of the libraries may be the reason. It must not make the other
    # fork server unfit too.
    if any(findings.found.values()) and not unfit:
        libraries = watch.libraries
    return {
        "unfit": unfit,
        "findings": dataclasses.asdict(findings),
        "libraries": libraries,
        "leaves": finishing is not None or atexit._ncallbacks() > at_exit,  # noqa: SLF001 - it has no public name
    }


#: The function that ends the collected session, as pytest does at its end; None without a session.
#: ``rank_session`` sets it, and ``finish`` calls it.
finishing: Callable[[], None] | None = None


def finish() -> None:
    """End the collected session, and call the exit functions of the interpreter.

    The fork server of the session calls this when it ends.
    """
    try:
        if finishing is not None:
            finishing()
    except BaseException:
        # Nobody is left to handle it, so it is only shown in the log.
        traceback.print_exc()
    run_exit_functions()


def settle(device: str) -> None:
    """Prepare what was imported for ranks: DeepSpeed for the CPU, and the garbage collector.

    The collector will skip all objects that exist now (``gc.freeze``). Some libraries call it again
    and again, and with torch, transformers and deepspeed in memory that took 0.4 s each time.
    Finalizers of torch are switched off too.
    """
    if device == "cpu":
        # gloo then does what DeepSpeed's own all-reduce would do.
        without_shared_memory()
    gc.collect()
    gc.freeze()
    _keep_operators_of_torch()


def _keep_operators_of_torch() -> None:
    """Keep ranks from removing torch's operators one by one when they end.

    torch registers a finalizer for each of some two hundred libraries of operators. At the end of a
    process they are useless, and took half of a short rank's CPU time. ``weakref`` has only a
    private name for all finalizers; ``tests/launch/test_private_names.py`` fails when it changes.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001 - see the docstring
        alive = finalizer.peek()
        if alive is None:
            # It was called already.
            continue
        _, function, *_ = alive
        if str(getattr(function, "__module__", "")).startswith("torch."):
            finalizer.atexit = False


def import_modules(names: Sequence[str], dump_at: float) -> None:
    """Import modules.

    One that cannot be imported is skipped: the code that needs it reports that better.

    Args:
        names: The modules, as ``torch`` and ``torch.distributed.fsdp``.
        dump_at: As for ``import_libraries``.
    """
    # Garbage collection took a fifth of the time. It is turned off by a threshold rather than by
    # ``gc.disable``, because a library may call that, or set a threshold, and ranks must have what
    # it sets.
    before = gc.get_threshold()
    gc.set_threshold(0)
    for name in names:
        try:
            with _stack_written(dump_at, 2), _process_unchanged(name), _recorded(name):
                importlib.import_module(name)
        except ImportError:
            # Not installed, or not for this torch.
            continue
        except Exception:
            traceback.print_exc()
    # Otherwise a library has set a threshold of its own, which stays.
    if gc.get_threshold()[0] == 0:
        gc.set_threshold(*before)


def _recorded(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that records what the import of a module imports.

    What is recorded is hidden from ranks until they import it (``unimported``). Nothing is recorded
    for torch itself, which every rank needs.
    """
    if name == "torch":
        return contextlib.nullcontext()
    return unimported.recorded(name)


@contextlib.contextmanager
def _process_unchanged(name: str) -> Iterator[None]:
    """Undo the changes of process-wide state that the import of a submodule of torch makes.

    Ranks that do not use the submodule must not have them. torch's compiler sets the directory of
    its cache in the environment, and will do so again when it needs it; sympy adds a warnings
    filter. Changes by other libraries stay, because the libraries may need them.
    """
    if not name.startswith("torch."):
        yield
        return
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]


def _restart_threads_of_numpy() -> None:
    """Let OpenBLAS start its threads again, which have ended with the fork.

    Otherwise it would start them at the first large product that a module computes, and they would
    be blamed on that module (https://github.com/OpenMathLib/OpenBLAS/wiki/Faq).
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # numpy imports this submodule only at its first use, and ``randomness`` reads its state.
        importlib.import_module("numpy.random")
        # Large enough that OpenBLAS divides the product among threads.
        square = numpy.ones((256, 256))
        square @ square


@contextlib.contextmanager
def _stack_written(dump_at: float, log: int) -> Iterator[None]:
    """Write this process's stack to a file if the block is still running at ``dump_at``.

    The thread that waits for that ends with the block, because a fork server must have no threads.

    Args:
        dump_at: The time, by ``clock.now``.
        log: The file descriptor.
    """
    seconds = max(0.1, dump_at - clock.now())
    faulthandler.dump_traceback_later(seconds, file=log)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _unfit(threads_of_libraries: Counter[str]) -> str:
    """Return why this process must not be forked, as one sentence; empty if it may be.

    Args:
        threads_of_libraries: By name, how many threads are no problem: ``{"python": 3}``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it initialised CUDA, which does not survive a fork"
    # The thread of ``_stack_written`` may take a moment to end.
    clock.wait_until(
        lambda: native_threads() <= threads_of_libraries, THREADS_END_TIMEOUT_S, every=0.01
    )
    extra = native_threads() - threads_of_libraries
    if not extra:
        return ""
    # A thread without a name of its own has the name of the process, which says nothing.
    own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    owners = [_LIBRARIES_BY_THREAD.get(name, name) for name in extra if name != own]
    of_owners = f" of {' and '.join(owners)}" if owners else ""
    count = sum(extra.values())
    if count == 1:
        return f"it started 1 thread{of_owners}, which does not survive a fork and may hold locks"
    return f"it started {count} threads{of_owners}, which do not survive a fork and may hold locks"
