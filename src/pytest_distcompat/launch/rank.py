"""The main of every rank, warm or cold: sets the process up, calls the target, reports how it ended.

``torchrun --nproc-per-node N -m pytest_distcompat.launch.rank REQUEST`` runs it without a fork server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import psutil

from pytest_distcompat.launch import preload
from pytest_distcompat.launch.process import STACK_SIGNAL, die_with_parent
from pytest_distcompat.launch.request import RankLog, Request, extend_import_path, has_ended, read_events

#: How long a failed rank waits for the others to report a failure of their own before it tears their connections.
GRACE = 0.3

_THREADS = "OMP_NUM_THREADS"


def main(path: str, *, by_hand: bool = False) -> None:
    """Run one request on this rank; returns only if all went well."""
    request = Request.read(path)
    die_with_parent()
    rank = int(os.environ["RANK"])
    log = RankLog(request.directory, rank, by_hand=by_hand)
    # A file of its own, kept open: at the time it is needed this process may be unable to open one.
    stacks = (Path(request.directory) / f"rank-{rank}.stack").open("w", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    threads = os.environ.get(_THREADS)
    os.environ.update(request.set)
    for name in request.unset:
        os.environ.pop(name, None)
    if os.environ.get(_THREADS) != threads:
        _use_threads()
    if request.cwd:
        os.chdir(request.cwd)
    extend_import_path(request.import_path)
    # multiprocessing hands its own start method down; a rank of torchrun has Python's default.
    multiprocessing.set_start_method(None, force=True)
    preload.randomness()
    log.write("start", pid=os.getpid())
    try:
        module, _, function = request.target.partition(":")
        getattr(importlib.import_module(module), function)(request.payload, log)
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a rank like any other error
        if not has_ended(read_events(request.directory, rank)):
            text = "".join(traceback.format_exception(error))
            log.error(type(error).__name__, _message(error), text)  # noqa: TRY400 - no logger, but a RankLog
        leave_failed(request)
    log.write("done")
    _flush()


def _use_threads() -> None:
    """As many threads as the environment says: OpenMP read its variable when the fork server loaded it."""
    import torch

    wanted = os.environ.get(_THREADS, "")
    count = int(wanted) if wanted.isdecimal() else len(os.sched_getaffinity(0))
    if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        # A torch that starts asks MKL, which uses no more threads than there are cores (hyperthreads are none).
        count = min(count, psutil.cpu_count(logical=False) or count)
    torch.set_num_threads(count)


def leave_failed(request: Request) -> None:
    """End this rank so that its peers notice, without barrier and without destroying the process group.

    Both would wait for peers who may be waiting for this rank. The grace lets ranks that fail at the same moment
    report their own failure, not the loss of this peer.
    """
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if all(has_ended(read_events(request.directory, rank)) for rank in range(request.world_size)):
            break
        time.sleep(0.01)
    _flush()
    os._exit(1)


def _message(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


if __name__ == "__main__":
    # Default dispositions, as a warm rank has them: torchrun's agent ends ranks by SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main(sys.argv[1], by_hand="--by-hand" in sys.argv)
