"""What ranks that live on do, one request after the other. Imported by ranks as ``kept_bodies``, by nobody else."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pytest_distcompat.launch import RankLog, serving


def look(payload: Mapping[str, Any], log: RankLog) -> None:
    """Who and where this is."""
    import torch

    log.write(
        "seen",
        pid=os.getpid(),
        environ=dict(os.environ),
        cwd=os.getcwd(),  # noqa: PTH109 - as the system says it
        numbers=[random.random(), float(torch.rand(()))],
    )
    if "seed" in payload:
        random.seed(payload["seed"])
        torch.manual_seed(payload["seed"])


def speak(payload: Mapping[str, Any], log: RankLog) -> None:
    """Past all of Python."""
    os.write(1, payload["words"].encode())
    if payload.get("fail"):
        raise ValueError(payload["words"])


def own_group(payload: Mapping[str, Any], log: RankLog) -> None:
    """A process group from the environment, properly ended."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    total = torch.ones(())
    distributed.all_reduce(total)
    log.write("sum", value=float(total))
    distributed.destroy_process_group()


def shared_group(payload: Mapping[str, Any], log: RankLog) -> None:
    """The group that outlives requests; ``payload["half"]``: a rank does one collective more than the others."""
    import torch
    from torch import distributed

    assert serving.kept is not None
    group = serving.kept.process_group("gloo")
    total = torch.ones(())
    distributed.all_reduce(total)
    log.write("sum", value=float(total), group=id(group))
    if payload.get("half") and distributed.get_rank() == 0:
        distributed.all_reduce(torch.full((), 7.0), async_op=True)


def at_end(payload: Mapping[str, Any], log: RankLog) -> None:
    """Leave something that goes wrong when the ranks leave."""
    assert serving.kept is not None
    serving.kept.at_end.append(lambda: globals().pop("no such fixture"))


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


_held: list[object] = []


def _memory() -> None:
    _held.append(bytearray(os.urandom(1)) * 2**29)


def _files() -> None:
    _held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(200))


CHANGES: dict[str, Callable[[], object]] = {
    "the environment": lambda: os.environ.update(TOUCHED="1"),
    "the working directory": lambda: os.chdir("/"),
    "the file mode mask": lambda: os.umask(0o007),
    "sys.path": lambda: sys.path.append("/nowhere"),
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "threads": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "child processes": lambda: subprocess.Popen(["sleep", "600"]),
    "what is to be done at exit": lambda: atexit.register(print),
    "what is to be done at exit: of a process": lambda: multiprocessing.util.Finalize(None, print, exitpriority=1),
    "logging": lambda: logging.root.setLevel(logging.DEBUG),
    "torch's global flags": _torch(lambda torch: torch.set_default_dtype(torch.float64)),
    "torch's global flags: deterministic": _torch(lambda torch: torch.use_deterministic_algorithms(True)),
    "torch's global flags: grad": _torch(lambda torch: torch.set_grad_enabled(False)),
    "the process group": _group,
    "accelerate's singletons": _accelerate,
    "multiprocessing's start method": lambda: multiprocessing.set_start_method("spawn", force=True),
    "memory": _memory,
    "open files": _files,
}
