"""Changes that a request leaves on a shared rank, by the name under which they are reported. Imported by ranks too."""

from __future__ import annotations

import asyncio
import atexit
import builtins
import codecs
import contextvars
import copyreg
import ctypes
import faulthandler
import gc
import importlib
import locale
import logging
import multiprocessing
import multiprocessing.util
import operator
import os
import pkgutil
import random
import resource
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

from pytest_distcompat.launch.rank_log import RankLog


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
_held: list[Any] = []


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


_variable: contextvars.ContextVar[int] = contextvars.ContextVar("touched")


def _prctl(option: int, value: object) -> Callable[[], object]:
    return lambda: ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _priority() -> None:
    import psutil

    psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def _wakeup() -> None:
    _, number = os.pipe()
    os.set_blocking(number, False)
    signal.set_wakeup_fd(number)


def _decimal() -> None:
    import decimal

    decimal.getcontext().prec = 7


def _loop_policy() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # to have a policy of one's own is one from Python 3.14 on
    asyncio.set_event_loop_policy(type("Own", (asyncio.DefaultEventLoopPolicy,), {})())


def _in_torch(name: str, value: object) -> Callable[[], object]:
    """Set what is in torch under that name."""

    def act() -> None:
        import torch

        where, _, last = name.rpartition(".")
        setattr(operator.attrgetter(where)(torch), last, value)

    return act


def _call(name: str, *args: object, **more: object) -> Callable[[], object]:
    """Call what is under that name."""

    def act() -> None:
        pkgutil.resolve_name(name)(*args, **more)

    return act


def _big_endian() -> None:
    from torch.serialization import LoadEndianness, set_default_load_endianness

    set_default_load_endianness(LoadEndianness.BIG)  # type: ignore[no-untyped-call]


def _collate() -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[str] = print


def _saved_tensors() -> None:
    from torch.autograd.graph import saved_tensors_hooks

    saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor).__enter__()


def _faults() -> None:
    if faulthandler.is_enabled():
        faulthandler.disable()
    else:
        faulthandler.enable()


def _group_of_user() -> None:
    """Change what the kernel lets a rank change. A rank leads its session, so it can start no other, and no process group."""
    if os.geteuid() == 0:
        os.setegid(12345)
        return
    user_namespace = 0x10000000
    if ctypes.CDLL(None, use_errno=True).unshare(user_namespace):
        raise OSError(ctypes.get_errno(), "unshare")


def _recomputing() -> None:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    _held.append(set_checkpoint_early_stop(False))
    _held[-1].__enter__()


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
    "user, group and session": _group_of_user,
    "prctl settings: name": _prctl(15, b"another"),
    "prctl settings: pdeathsig": _prctl(1, signal.SIGTERM),
    "prctl settings: subreaper": _prctl(36, 1),
    "the interpreter's settings: argv": lambda: sys.argv.append("--more"),
    "the interpreter's settings: executable": lambda: setattr(sys, "executable", "/bin/true"),
    "the interpreter's settings: cache": lambda: setattr(sys, "pycache_prefix", "/elsewhere"),
    "the interpreter's settings: first streams": lambda: setattr(sys, "__stdout__", sys.__stderr__),
    "the level of forward differentiation": _torch(lambda torch: torch.autograd.forward_ad.enter_dual_level()),
    "the directory of temporary files": lambda: setattr(tempfile, "tempdir", "/elsewhere"),
    "logging: names of levels": lambda: logging.addLevelName(logging.INFO, "TOLD"),
    "the CPUs it may use: policy": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    "the CPUs it may use: disk": _priority,
    "the file that signals wake up": _wakeup,
    "garbage collection": gc.disable,
    "garbage collection: debug": lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE),
    "import hooks": lambda: sys.meta_path.append(object()),  # type: ignore[arg-type]
    "import hooks: of paths": lambda: sys.path_hooks.append(print),  # type: ignore[arg-type]
    "functions of warnings": lambda: setattr(warnings, "showwarning", print),
    "context variables": lambda: _variable.set(1),
    "the default time limit of sockets": lambda: socket.setdefaulttimeout(7),
    "how text is encoded that does not fit": lambda: codecs.register_error("replace", codecs.ignore_errors),
    "how objects are pickled": lambda: copyreg.dispatch_table.update(dict.fromkeys(copyreg.dispatch_table, str)),
    "functions of the standard library": lambda: setattr(random, "random", print),
    "multiprocessing's interpreter": lambda: multiprocessing.set_executable("/bin/true"),
    "logging: records": lambda: logging.setLogRecordFactory(lambda *_: None),  # type: ignore[arg-type]
    "logging: classes": lambda: logging.setLoggerClass(type("Own", (logging.Logger,), {})),
    "logging: last resort": lambda: setattr(logging, "lastResort", None),
    "loggers": lambda: logging.getLogger("concurrent.futures").setLevel(logging.DEBUG),
    "loggers: handlers": lambda: logging.getLogger("asyncio").addHandler(logging.NullHandler()),
    "asyncio's event loops": _loop_policy,
    "asyncio's event loops: a loop": lambda: asyncio.set_event_loop(asyncio.new_event_loop()),
    "how decimal numbers are computed": _decimal,
    "how long a field of csv may be": _call("csv.field_size_limit", 77),
    "garbage collection: thresholds": lambda: gc.set_threshold(1),
    "garbage collection: frozen objects": gc.unfreeze,
    "the interpreter's settings: recursion": lambda: sys.setrecursionlimit(4321),
    "the interpreter's settings: switches": lambda: sys.setswitchinterval(0.5),
    "the interpreter's settings: trace": lambda: sys.settrace(lambda *_: None),
    "the interpreter's settings: profile": lambda: sys.setprofile(lambda *_: None),
    "the interpreter's settings: digits": lambda: sys.set_int_max_str_digits(5000),
    "the interpreter's settings: libraries": lambda: sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL),
    "the interpreter's settings: stacks": lambda: threading.stack_size(2**20),
    "the interpreter's settings: generators": lambda: sys.set_asyncgen_hooks(firstiter=print),
    "the interpreter's settings: coroutines": lambda: sys.set_coroutine_origin_tracking_depth(3),
    "the interpreter's settings: faults": _faults,
    "the interpreter's settings: memory": tracemalloc.start,
    "the interpreter's settings: tracebacks": lambda: setattr(sys, "tracebacklimit", 3),
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
    "torch's global flags: overwritten parameters": _call(
        "torch.__future__.set_overwrite_module_params_on_conversion", True
    ),
    "torch's global flags: swapped parameters": _call("torch.__future__.set_swap_module_params_on_conversion", True),
    "torch's global flags: benchmarks": _in_torch("backends.cudnn.benchmark_limit", 3),
    "torch's global flags: nnpack": _call("torch.backends.nnpack.set_flags", False),
    "torch's global flags: half precision": _in_torch("backends.cuda.matmul.allow_fp16_accumulation", True),
    "torch's global flags: attention in half": _call("torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp", True),
    "torch's global flags: order of attention": _torch(lambda torch: torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])),
    "torch's global flags: hub": _call("torch.hub.set_dir", "/nowhere"),
    "torch's global flags: fusion": _call("torch.jit.enable_onednn_fusion", True),
    "torch's global flags: sparse": _call("torch.sparse.check_sparse_tensor_invariants.enable"),
    "hooks for saved tensors": _saved_tensors,
    "how torch loads and saves": _big_endian,
    "how torch loads and saves: checksums": _call("torch.serialization.set_crc32_options", False),
    "how torch loads and saves: safe globals": _call("torch.serialization.add_safe_globals", [random.Random]),
    "how torch prints": _call("torch.set_printoptions", precision=9),
    "the debug level of torch.distributed": _torch(
        lambda torch: torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    ),
    "how batches are collated": _collate,
    "how distributions check their arguments": _call(
        "torch.distributions.Distribution.set_default_validate_args", False
    ),
    "how torch recomputes": _recomputing,
    "torch.compile's stance": _call("torch.compiler.set_stance", "force_eager"),
    "torch's global hooks": _hook("torch.nn.modules.module", "register_module_forward_hook"),
    "torch's global hooks: optimizers": _hook("torch.optim.optimizer", "register_optimizer_step_pre_hook"),
    "torch's modes": _enter("overrides.TorchFunctionMode"),
    "torch's modes: operators": _enter("utils._python_dispatch.TorchDispatchMode"),
    "functions of torch": _patch("torch", "save"),
    "functions of torch.distributed": _patch("torch.distributed", "barrier"),
    "torch.compile's settings": _torch(lambda torch: setattr(torch._dynamo.config, "suppress_errors", True)),
    "inductor's settings": _torch(lambda torch: setattr(torch._inductor.config, "max_autotune", True)),
    "numpy's settings": lambda: _numpy(divide="raise"),
    "numpy's settings: printing": _call("numpy.set_printoptions", precision=3),
    "numpy's settings: buffers": _call("numpy.setbufsize", 16384),
    "how numpy prints polynomials": _call("numpy.polynomial.set_default_printstyle", "ascii"),
    "the process group": _group,
    "accelerate's singletons": _accelerate,
    "memory": _memory,
    "open files": _files,
}
