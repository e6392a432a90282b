"""Preparation of fork servers: they import modules and collect tests, so that ranks need not.

A ``Warmth`` names the modules, and the function that collects. A process with a CUDA context or
with threads cannot be forked safely. So some imports are kept from creating these, and in the end
the process is checked.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
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

#: The lowest major compute capability on which Triton runs (torch/utils/_triton.py).
_OF_TRITON = 7
#: The functions of NVML that a program calls first to learn about devices.
_FIRST_QUESTIONS = (
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetHandleByPciBusId",
    "nvmlSystemGetDriverVersion",
)
#: Libraries by the names of their threads.
_LIBRARIES_BY_THREAD = {"jemalloc_bg_thd": "jemalloc (pyarrow has one of its own)"}
#: How long a cancelled thread may take to end, in seconds.
THREADS_END_TIMEOUT_S = 0.3
#: The result of ``Warmth.call``, which ranks inherit by fork.
collected: Any = None


def import_libraries(warmth: Mapping[str, Any], dump_at: float) -> dict[str, Any]:
    """Import the modules that a Warmth names.

    Args:
        warmth: The fields of a Warmth, the ``device`` and, for GPUs, the fields of GpuFacts as
            ``gpus``.
        dump_at: When to write the stack of an import that hangs, by ``clock.now``. The parent gives
            up soon after that.

    Returns:
        Why this process is ``unfit`` to be forked; empty if it is fit.
    """
    extend_import_path(warmth["path"])
    if warmth["device"] != "cpu":
        nccl.tell(
            nccl.Library(Path(known["path"]), tuple(known["version"])) for known in warmth["nccl"]
        )
        answer_without_cuda(GpuFacts(**warmth["gpus"]))
        postpone_nvml()
    import_modules((*MODULES_OF_EVERY_RANK, *warmth["modules"]), dump_at)
    _restart_threads_of_numpy()
    threads = native_threads()
    settle(warmth["device"])
    return {"unfit": _unfit(threads)}


def collect(warmth: Mapping[str, Any], dump_at: float) -> dict[str, Any]:
    """Call the function that a Warmth names, and store its result in ``collected``.

    The process has imported the libraries before.

    Args:
        warmth: As for ``import_libraries``.
        dump_at: As for ``import_libraries``.

    Returns:
        Why the process is ``unfit`` to be forked; the ``findings`` about what user code did at its
        import; the ``libraries`` to import for ranks that must collect the tests themselves because
        of that; and whether exit functions must be called when the process ``leaves``.
    """
    global collected  # noqa: PLW0603 - a fork server hands things over by being forked
    module, _, function = warmth["call"].partition(":")
    set_import_path(warmth["path"])
    if warmth["device"] != "cpu":
        devices.tell(GpuFacts(**warmth["gpus"]))
    # The fork has ended the threads.
    _restart_threads_of_numpy()
    threads = native_threads()
    before = randomness.states()
    at_exit = atexit._ncallbacks()  # noqa: SLF001 - it has no public name
    watch = Watch(warmth["own"])
    # A copy, because pytest captures stderr while it collects.
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as log:
        try:
            call = getattr(importlib.import_module(module), function)
            with _stack_written(dump_at, log.fileno()), watch:
                collected = call(warmth["payload"])
        except BaseException:
            # A conftest may raise anything. The ranks run it again, and report it.
            traceback.print_exc(file=log)
    rank.start_method = multiprocessing.get_start_method(allow_none=True)
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


#: The function that ends the collected session; ``finish`` calls it first.
finishing: Callable[[], None] | None = None


def finish() -> None:
    """End the collected session, and call the exit functions of the interpreter."""
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
    """
    if device == "cpu":
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
        if alive is not None and str(getattr(alive[1], "__module__", "")).startswith("torch."):
            finalizer.atexit = False


def import_modules(names: Sequence[str], dump_at: float) -> None:
    """Import modules.

    One that cannot be imported is skipped: the code that needs it reports that better.
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
    if gc.get_threshold()[0] == 0:
        gc.set_threshold(*before)


def _recorded(name: str) -> contextlib.AbstractContextManager[None]:
    """Record what the import of a module imports.

    But not for torch itself, which every rank needs.
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
        # numpy imports this submodule only at its first use.
        importlib.import_module("numpy.random")
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
    faulthandler.dump_traceback_later(max(0.1, dump_at - clock.now()), file=log)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def answer_without_cuda(gpus: GpuFacts) -> None:
    """Let torch answer questions about GPUs from known facts instead of by NVML or CUDA.

    Libraries, such as torchao, call four functions of torch when they are imported. To answer,
    torch would open NVML or CUDA, whose thread and context do not survive the fork of a rank. In
    ranks, and once CUDA is initialised, torch answers by itself. ``has_triton`` is private;
    ``tests/unit/test_ask_nvml.py`` fails when it changes.
    """
    devices.tell(gpus)
    torch: Any = importlib.import_module("torch")
    cuda: Any = importlib.import_module("torch.cuda")
    triton: Any = importlib.import_module("torch.utils._triton")

    def answer(by_torch: Callable[..., Any], known: Callable[[], Any]) -> Callable[..., Any]:
        @functools.wraps(by_torch)
        def function(*args: Any, **kwargs: Any) -> Any:
            # A call with an argument is about another GPU than the first, for which libraries do
            # not ask at import.
            of_other_gpu = any(argument is not None for argument in (*args, *kwargs.values()))
            if of_other_gpu or devices.told() is None or cuda.is_initialized():
                return by_torch(*args, **kwargs)
            return known()

        return function

    if torch.backends.cuda.is_built():
        cuda.device_count = answer(cuda.device_count, lambda: gpus.count)
        cuda.is_available = answer(cuda.is_available, lambda: gpus.count > 0)
    if gpus.capability is not None:
        major, minor = gpus.capability
        cuda.get_device_capability = answer(cuda.get_device_capability, lambda: (major, minor))
        triton.has_triton = answer(
            triton.has_triton, lambda: triton.has_triton_package() and major >= _OF_TRITON
        )


def postpone_nvml() -> None:
    """Postpone ``nvmlInit`` until a program first asks NVML for a device.

    DeepSpeed calls ``nvmlInit`` when it is imported, and asks for devices later. So a fork server
    never opens NVML, and a rank that asks opens it itself.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return
    _PostponedNvml(nvml).install()


class _PostponedNvml:
    """Replacements for functions of NVML that postpone calls of ``nvmlInit``.

    Args:
        nvml: The module ``pynvml``.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._init = nvml.nvmlInit
        self._shutdown = nvml.nvmlShutdown
        #: How many calls of ``nvmlInit`` are postponed.
        self._waiting = 0

    def install(self) -> None:
        """Replace the functions in the module."""
        self._nvml.nvmlInit = self._postpone
        self._nvml.nvmlShutdown = self._take_back
        for name in _FIRST_QUESTIONS:
            if hasattr(self._nvml, name):
                setattr(self._nvml, name, self._initialised(getattr(self._nvml, name)))

    def _postpone(self) -> None:
        if devices.told() is not None:
            self._waiting += 1
        else:
            self._init()

    def _take_back(self) -> None:
        if self._waiting:
            self._waiting -= 1
        else:
            self._shutdown()

    def _initialised(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that first makes the postponed calls of ``nvmlInit``."""

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            while self._waiting:
                self._waiting -= 1
                self._init()
            return function(*args)

        return call


def _unfit(threads_of_libraries: Counter[str]) -> str:
    """Return why this process must not be forked, as one sentence; empty if it may be.

    Args:
        threads_of_libraries: How many threads of each name are no problem.
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
    own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    owners = [_LIBRARIES_BY_THREAD.get(name, name) for name in extra if name != own]
    of_owners = f" of {' and '.join(owners)}" if owners else ""
    count = sum(extra.values())
    if count == 1:
        return f"it started 1 thread{of_owners}, which does not survive a fork and may hold locks"
    return f"it started {count} threads{of_owners}, which do not survive a fork and may hold locks"
