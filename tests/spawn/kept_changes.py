"""What a request leaves changed on a rank that lives on, by the name under which that is told. Imported by ranks too."""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import locale
import logging
import multiprocessing
import multiprocessing.util
import operator
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pytest_distcompat.launch import RankLog


def change(payload: Mapping[str, Any], log: RankLog) -> None:
    """Leave on rank 1 what ``payload["what"]`` names as no test should."""
    if log.rank == 1:
        CHANGES[payload["what"]]()


def _torch(change: Callable[[Any], object]) -> Callable[[], object]:
    def act() -> None:
        import torch

        change(torch)

    return act


def _group() -> None:
    from torch import distributed

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())  # type: ignore[attr-defined]


def _accelerate() -> None:
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_CPU"] = "true"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    PartialState(cpu=True)


#: What is not to go away when a function returns.
_held: list[object] = []


def _memory() -> None:
    _held.append(bytearray(os.urandom(1)) * 2**29)


def _files() -> None:
    _held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(200))


def _removed_directory() -> None:
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())  # noqa: PTH106, PTH109 - as tests do it


def _redirected() -> None:
    file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 1)
    os.close(file)


def _zone() -> None:
    """As a test does that takes back the variable alone."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    os.environ.pop("TZ")
    if before is not None:
        os.environ["TZ"] = before


def _small_numbers() -> None:
    import torch

    assert torch.set_flush_denormal(True)


def _precision() -> None:
    """The new way to say it. Who asks in the old one is refused after that."""
    import torch

    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _enter(name: str) -> Callable[[], object]:
    """Enter what is in torch under that name, and do not leave it."""

    def act() -> None:
        import torch
        import torch.utils._python_dispatch  # not imported by torch itself in all releases

        operator.attrgetter(name)(torch)().__enter__()

    return act


def _hook(module: str, name: str) -> Callable[[], object]:
    """Have torch call something for every module, or optimizer."""
    return lambda: getattr(importlib.import_module(module), name)(lambda *_: None)


def _patch(module: str, name: str) -> Callable[[], object]:
    """Put something else in the place of a function, and do not take it back."""
    return lambda: setattr(sys.modules[module], name, lambda *_, **__: None)


def _numpy(**settings: Any) -> None:
    import numpy as np

    np.seterr(**settings)


#: What is said of it, and after a colon which one it is where there are several.
CHANGES: dict[str, Callable[[], object]] = {
    "the environment": lambda: os.environ.update(TOUCHED="1"),
    "the working directory": lambda: os.chdir("/"),
    "the working directory: removed": _removed_directory,
    "the file mode mask": lambda: os.umask(0o007),
    "sys.path": lambda: sys.path.append("/nowhere"),
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}),
    "timers": lambda: signal.setitimer(signal.ITIMER_REAL, 3600),
    "timers: alarm": lambda: signal.alarm(3600),
    "resource limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (900, 900)),
    "resource limits: stack": lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 23)),
    "the CPUs it may use": lambda: os.nice(1),
    "the standard streams": lambda: setattr(sys, "stdout", sys.stderr),
    "the standard streams: closed": lambda: os.close(0),
    "the standard streams: redirected": _redirected,
    "threads": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "child processes": lambda: subprocess.Popen(["sleep", "600"]),
    "what is to be done at exit": lambda: atexit.register(print),
    "what is to be done at exit: of a process": lambda: multiprocessing.util.Finalize(None, print, exitpriority=1),
    "multiprocessing's start method": lambda: multiprocessing.set_start_method("spawn", force=True),
    "garbage collection": gc.disable,
    "garbage collection: thresholds": lambda: gc.set_threshold(1),
    "the interpreter's settings: recursion": lambda: sys.setrecursionlimit(4321),
    "the interpreter's settings: switches": lambda: sys.setswitchinterval(0.5),
    "the interpreter's settings: trace": lambda: sys.settrace(lambda *_: None),
    "the interpreter's settings: profile": lambda: sys.setprofile(lambda *_: None),
    "sys.excepthook": lambda: setattr(sys, "excepthook", print),
    "the interpreter's settings: of threads": lambda: setattr(threading, "excepthook", print),
    "warning filters": lambda: warnings.simplefilter("error", UserWarning),
    "the locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8" if locale.setlocale(locale.LC_ALL) == "C" else "C"),
    "the time zone": _zone,
    "builtins, os or time: sleep": _patch("time", "sleep"),
    "builtins, os or time: kill": _patch("os", "kill"),
    "builtins, os or time: a new name": lambda: setattr(builtins, "faulty", True),
    "logging": lambda: logging.root.setLevel(logging.DEBUG),
    "the log level of torch": lambda: logging.getLogger("torch").setLevel(logging.DEBUG),
    "torch's global flags": _torch(lambda torch: torch.set_default_dtype(torch.float64)),
    "torch's global flags: tensor type": _torch(lambda torch: torch.set_default_tensor_type(torch.DoubleTensor)),
    "torch's global flags: device": _torch(lambda torch: torch.set_default_device("meta")),
    "torch's global flags: deterministic": _torch(lambda torch: torch.use_deterministic_algorithms(True)),
    "torch's global flags: grad": _torch(lambda torch: torch.set_grad_enabled(False)),
    "torch's global flags: threads": _torch(lambda torch: torch.set_num_interop_threads(3)),
    "torch's global flags: small numbers": _small_numbers,
    "torch's global flags: autocast": _torch(lambda torch: torch.set_autocast_dtype("cpu", torch.float16)),
    "torch's global flags: cudnn": _torch(lambda torch: setattr(torch.backends.cudnn, "enabled", False)),
    "torch's global flags: attention": _torch(lambda torch: torch.backends.cuda.enable_math_sdp(False)),
    "torch's global flags: precision": _precision,
    "torch's global hooks": _hook("torch.nn.modules.module", "register_module_forward_hook"),
    "torch's global hooks: optimizers": _hook("torch.optim.optimizer", "register_optimizer_step_pre_hook"),
    "torch's modes": _enter("overrides.TorchFunctionMode"),
    "torch's modes: operators": _enter("utils._python_dispatch.TorchDispatchMode"),
    "functions of torch": _patch("torch", "save"),
    "functions of torch.distributed": _patch("torch.distributed", "barrier"),
    "torch.compile's settings": _torch(lambda torch: setattr(torch._dynamo.config, "suppress_errors", True)),
    "inductor's settings": _torch(lambda torch: setattr(torch._inductor.config, "max_autotune", True)),
    "numpy's settings": lambda: _numpy(divide="raise"),
    "the process group": _group,
    "accelerate's singletons": _accelerate,
    "memory": _memory,
    "open files": _files,
}
