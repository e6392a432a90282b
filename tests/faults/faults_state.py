"""Not collected here: test_state.py copies it; one test changes all that a process has, the next one must see none of it."""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import locale
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if "pytest_distcompat.launch.preload" in sys.modules:
    # In the fork server alone: the state of libraries that it has imported is compared.
    for name in ("accelerate", "deepspeed", "numpy.random"):
        importlib.import_module(name)

mark = pytest.mark.distcompat(world_size=2)
HERE = os.getpid()
# As some plugins do when pytest is configured: no seed, ranks are to draw their own thereafter.
random.random()


def state() -> dict[str, Any]:
    """Whatever of this process a test may change, as plain data."""
    import numpy as np
    import torch

    umask = os.umask(0)
    os.umask(umask)
    return {
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("FAULTY", "HOME", "LANG"))},
        "cwd": str(Path.cwd()),
        "umask": umask,
        "limits": resource.getrlimit(resource.RLIMIT_CORE),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "alarm": signal.getitimer(signal.ITIMER_REAL),
        "path": "/of/a/fault" in sys.path,
        "modules": "antigravity_of_faults" in sys.modules,
        "recursion": sys.getrecursionlimit(),
        "builtin": hasattr(builtins, "faulty"),
        "filters": any(f[0] == "error" and f[2] is UserWarning for f in warnings.filters),
        "log level": logging.getLogger().level,
        "gc": gc.isenabled(),
        "locale": locale.setlocale(locale.LC_ALL),
        "threads": threading.active_count(),
        "hooks": (sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "torch threads": torch.get_num_threads(),
        "print": torch._tensor_str.PRINT_OPTS.precision,
        "seed": torch.initial_seed() == 7,
        "numpy": np.geterr()["divide"],
        "initialized": torch.distributed.is_initialized(),
        "module": json.__dict__.get("faulty"),
        "linear": torch.nn.Linear.__dict__.get("faulty"),
        "accelerate": _accelerate(),
        "deepspeed": _deepspeed(),
    }


def _accelerate() -> dict[str, str]:
    from accelerate.state import AcceleratorState, PartialState

    return {name: str(sorted(cls._shared_state)) for name, cls in (("p", PartialState), ("a", AcceleratorState))}


def _deepspeed() -> bool:
    from deepspeed.comm import comm

    return comm.cdb is None


def change(path: Path) -> None:
    import deepspeed
    import numpy as np
    import torch
    from accelerate import Accelerator

    Accelerator(cpu=True)
    deepspeed.init_distributed("gloo", verbose=False)
    os.environ.update(FAULTY="1", HOME=str(path))
    os.environ.pop("LANG", None)
    os.chdir(path)
    os.umask(0o777)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.setitimer(signal.ITIMER_REAL, 3600)
    sys.path.insert(0, "/of/a/fault")
    sys.modules["antigravity_of_faults"] = os
    sys.setrecursionlimit(4321)
    builtins.faulty = json.faulty = torch.nn.Linear.faulty = True  # type: ignore[attr-defined]
    warnings.simplefilter("error", UserWarning)
    logging.getLogger().setLevel(1)
    gc.disable()
    locale.setlocale(locale.LC_ALL, "C.UTF-8" if locale.setlocale(locale.LC_ALL) == "C" else "C")
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    sys.excepthook = lambda *_: None
    threading.excepthook = lambda *_: None
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(2)
    torch.set_printoptions(precision=1)  # type: ignore[no-untyped-call]
    torch.manual_seed(7)
    random.seed(7)
    np.seterr(divide="raise")


Record = Callable[[str, object], None]


@mark
def test_well(rank: int) -> None:
    pass


def test_of_the_parent_before(record_property: Record) -> None:
    record_property("pid", HERE)
    record_property("cwd", str(Path.cwd()))


@mark
def test_before(rank: int, record_property: Record) -> None:
    record_property("state", json.dumps(state()))


@mark
def test_changes(rank: int, tmp_path: Path, record_property: Record) -> None:
    change(tmp_path)
    record_property("state", json.dumps(state()))


@mark
def test_after(rank: int, record_property: Record) -> None:
    record_property("state", json.dumps(state()))


@mark
def test_changes_and_fails(rank: int, tmp_path: Path) -> None:
    change(tmp_path)
    if rank == 1:
        raise ValueError("changed")


@mark
def test_after_the_failure(rank: int, record_property: Record) -> None:
    record_property("state", json.dumps(state()))


def test_of_the_parent_after(record_property: Record) -> None:
    assert os.environ.get("FAULTY") is None
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    record_property("pid", HERE)
    record_property("cwd", str(Path.cwd()))


# Ranks start as torchrun would start them.


@mark
def test_random(rank: int, record_property: Record, shared_dir: Path, process_group: Any) -> None:
    import numpy as np
    import torch
    from torch import distributed

    drawn = {"torch": torch.rand(1).item(), "numpy": np.random.rand(), "random": random.random()}  # noqa: NPY002 - the global one
    (shared_dir / str(rank)).write_text(json.dumps(drawn), encoding="utf-8")
    distributed.barrier()
    record_property(
        "drawn", "".join((shared_dir / str(other)).read_text(encoding="utf-8") + "\n" for other in range(2))
    )


@mark
def test_start_method(rank: int, record_property: Record) -> None:
    import multiprocessing

    record_property("method", multiprocessing.get_start_method())
