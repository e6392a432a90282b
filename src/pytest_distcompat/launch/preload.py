"""Preparation of fork servers: imports the heavy modules, calls one function, checks that the process may be forked.

A ``Warmth`` names the modules and the function, which collects the pytest session. A fork server must stay fit to fork: no
CUDA context and no threads.
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

#: The modules that each rank imports first: a tenth of a second each, if they are not imported here. The launcher process
#: needs them too, and a fork server is forked from it.
MODULES_OF_EVERY_RANK = (
    "torch",
    "torch.distributed.elastic.multiprocessing.api",
    "multiprocessing.popen_forkserver",
    "multiprocessing.queues",
    "pytest_distcompat.launch.files",
    "pytest_distcompat.launch.rank",
)

#: The first major compute capability that Triton runs on (torch/utils/_triton.py).
_OF_TRITON = 7
#: The functions of NVML from which a program learns of devices.
_FIRST_QUESTIONS = (
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetHandleByPciBusId",
    "nvmlSystemGetDriverVersion",
)
#: Libraries by the names of their threads.
_LIBRARIES_BY_THREAD = {"jemalloc_bg_thd": "jemalloc (pyarrow has one of its own)"}
#: How long threads may take to end, in seconds.
THREADS_END_TIMEOUT_S = 0.3
#: The result of ``call``, which ranks inherit by fork.
collected: Any = None


def import_libraries(warmth: Mapping[str, Any], dump_at: float) -> dict[str, Any]:
    """Import the modules that a Warmth names, and return why this process is ``unfit`` to be forked from.

    ``warmth`` has the fields of a Warmth, the ``device`` and, for GPUs, the fields of GpuFacts as ``gpus``. At ``dump_at``, by
    ``clock.now``, just before the parent gives up, the stack of an import that hangs is written.
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
    """Call the function that a Warmth names, in a process that has imported the libraries, and store its result.

    Returns:
        Why the process is ``unfit`` to be forked from, the ``findings`` of the watch over the call, the ``libraries`` that
        ranks need which collect tests themselves, and whether exit functions are to be called when the process ``leaves``.
    """
    global collected  # noqa: PLW0603 - a fork server hands things over by being forked
    module, _, function = warmth["call"].partition(":")
    set_import_path(warmth["path"])
    if warmth["device"] != "cpu":
        devices.tell(GpuFacts(**warmth["gpus"]))
    # A fork ends those threads.
    _restart_threads_of_numpy()
    threads = native_threads()
    before = randomness.states()
    at_exit = atexit._ncallbacks()  # noqa: SLF001 - it has no public name
    watch = Watch(warmth["own"])
    # pytest's capture takes stderr away while it collects.
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as log:
        try:
            call = getattr(importlib.import_module(module), function)
            with _stack_written(dump_at, log.fileno()), watch:
                collected = call(warmth["payload"])
        except BaseException:  # a conftest may raise anything; the ranks run it again and report it
            traceback.print_exc(file=log)
    rank.start_method = multiprocessing.get_start_method(allow_none=True)
    randomness.remember_seeds(before)
    settle(warmth["device"])
    findings = watch.findings
    unfit = _unfit(threads)
    libraries = []
    # If this process is unfit, one of these libraries may be the reason, and must not make the other server unfit too.
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
    """Call the exit functions of a process that collected tests, and those of its interpreter."""
    try:
        if finishing is not None:
            finishing()
    except BaseException:  # it can only be shown in the log
        traceback.print_exc()
    run_exit_functions()


def settle(device: str) -> None:
    """Prepare what was imported for ranks: DeepSpeed for the CPU, and all objects for the garbage collector.

    It does not go through those that exist now. Some libraries collect again and again, and with torch, transformers and
    deepspeed in memory that takes 0.4 s each time.
    """
    if device == "cpu":
        without_shared_memory()
    gc.collect()
    gc.freeze()
    _keep_operators_of_torch()


def _keep_operators_of_torch() -> None:
    """Let ranks end without taking torch's operators out of its dispatcher, which ends with them.

    torch registers a finalizer for each of some two hundred libraries of operators, which took half of a short rank's CPU time.
    ``weakref`` has only a private name for all finalizers; ``tests/launch/test_private_names.py`` fails when it goes away.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001 - see the docstring
        alive = finalizer.peek()
        if alive is not None and str(getattr(alive[1], "__module__", "")).startswith("torch."):
            finalizer.atexit = False


def import_modules(names: Sequence[str], dump_at: float) -> None:
    """Import the modules. One that cannot be imported is left to the code that needs it, which reports that better."""
    # To go through what the libraries have made again and again took a fifth of the imports. Not ``gc.disable``: a library may
    # do that itself, or set a threshold, and ranks then have what it set.
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
    """Record what modules import, after the import of torch itself, which every rank needs."""
    return contextlib.nullcontext() if name == "torch" else unimported.recorded(name)


@contextlib.contextmanager
def _process_unchanged(name: str) -> Iterator[None]:
    """Undo what the import of a module below torch sets in the process: ranks that never import it would not have it.

    torch's compiler sets the directory of its cache, and does so again when it looks for it; sympy adds a filter of warnings.
    Other libraries may need what they set.
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
    """Have OpenBLAS start its threads again, which it ended at the fork.

    It would do so at the first large product, as a module may compute one, and they would count as threads of that module.
    https://github.com/OpenMathLib/OpenBLAS/wiki/Faq
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # numpy imports it only at its first use.
        importlib.import_module("numpy.random")
        square = numpy.ones((256, 256))
        square @ square


@contextlib.contextmanager
def _stack_written(dump_at: float, log: int) -> Iterator[None]:
    """Write to that file where this process is if the block lasts until ``dump_at``.

    The thread that waits for that is gone after the block: a fork server must have none.
    """
    faulthandler.dump_traceback_later(max(0.1, dump_at - clock.now()), file=log)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def answer_without_cuda(gpus: GpuFacts) -> None:
    """Have this fork server go by these facts, and torch too while CUDA is not initialised; ranks have torch's own answers.

    Libraries call four functions of torch when they are imported, and torch opens NVML or CUDA to answer. NVML's thread and a
    CUDA context would not survive the fork of a rank: transformers 5 imports torchao where it is installed, and that calls them.
    ``has_triton`` is private; ``tests/unit/test_ask_nvml.py`` fails when it goes away.
    """
    devices.tell(gpus)
    torch: Any = importlib.import_module("torch")
    cuda: Any = importlib.import_module("torch.cuda")
    triton: Any = importlib.import_module("torch.utils._triton")

    def answer(by_torch: Callable[..., Any], known: Callable[[], Any]) -> Callable[..., Any]:
        @functools.wraps(by_torch)
        def function(*args: Any, **kwargs: Any) -> Any:
            # Of other GPUs than the first nobody asks at import.
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
    """Have ``nvmlInit`` take effect when a device is first asked for: DeepSpeed calls it when it is imported, and asks later.

    All that NVML tells of a device needs its handle. A rank that asks opens NVML itself.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return
    _PostponedNvml(nvml).install()


class _PostponedNvml:
    """Stand-ins for functions of NVML, and how many calls of ``nvmlInit`` wait for the first question.

    Args:
        nvml: The module ``pynvml``.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._init = nvml.nvmlInit
        self._shutdown = nvml.nvmlShutdown
        self._waiting = 0

    def install(self) -> None:
        """Put the stand-ins into the module."""
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
        """Return the function with the calls of ``nvmlInit`` made that wait."""

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            while self._waiting:
                self._waiting -= 1
                self._init()
            return function(*args)

        return call


def _unfit(threads_of_libraries: Counter[str]) -> str:
    """Return why this process must not be forked from, as one sentence; empty if it may."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it initialised CUDA, which does not survive a fork"
    # The thread of faulthandler's timer that was cancelled may take a moment to end.
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
