"""The main of every rank, warm or cold: sets the process up, calls the target, reports how it ended.

``torchrun --nproc-per-node N -m pytest_distcompat.launch.rank REQUEST`` runs it without a fork server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import psutil

from pytest_distcompat import clock
from pytest_distcompat.excerpt import explained
from pytest_distcompat.launch import flight_recorder, pristine_builtins, randomness
from pytest_distcompat.launch.peers import lost_peer
from pytest_distcompat.launch.process import STACK_SIGNAL, die_with_parent, run_exit_functions
from pytest_distcompat.launch.request import RankLog, Request, extend_import_path, has_ended, read_events
from pytest_distcompat.launch.stacks import stack_file
from pytest_distcompat.launch.waited import ask_where

#: How long a failed rank waits for the others to report a failure of their own before it tears their connections.
GRACE = 0.3

_THREADS = "OMP_NUM_THREADS"
#: The start method of multiprocessing that modules set in the fork server that imported them.
start_method: str | None = None


def main(path: str, *, by_hand: bool = False) -> None:
    """Run one request on this rank; returns only if all went well."""
    request = Request.read(path)
    die_with_parent()
    number = int(os.environ["RANK"])
    # A file of its own, kept open: at the time it is needed this process may be unable to open one.
    # Whoever asks for stacks again empties it before.
    stacks = stack_file(request.directory, number).open("a", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    flight_recorder.answer(request.directory, number)
    # multiprocessing hands its own start method down; a rank of torchrun has Python's default, or what a module sets.
    multiprocessing.set_start_method(start_method, force=True)
    prepare(request)
    randomness.renew()
    perform(request, by_hand=by_hand)
    flush()


def forked(path: str) -> None:
    """Run one request on a forked rank. It ends by ``os._exit``, so what waits for its interpreter's end is called before."""
    # Not here: torch's agent waits for what this function returns, and what is called may end the process.
    multiprocessing.util.Finalize(None, run_exit_functions, exitpriority=-1)
    # By this name code tells a process that somebody started from one of multiprocessing's workers.
    multiprocessing.current_process().name = "MainProcess"
    main(path)


def prepare(request: Request) -> None:
    """Bring this process to where the one that asks is: environment, threads, directory, command line, path."""
    threads = os.environ.get(_THREADS)
    os.environ.update(request.set)
    for name in request.unset:
        os.environ.pop(name, None)
    if os.environ.get(_THREADS) != threads:
        _use_threads()
    if request.cwd:
        os.chdir(request.cwd)
    if request.argv:
        sys.argv[:] = request.argv
    extend_import_path(request.import_path)


def perform(request: Request, *, by_hand: bool = False) -> None:
    """Do what the request asks for. A failure is reported and ends this process."""
    number = int(os.environ["RANK"])
    with contextlib.closing(RankLog(request.directory, number, by_hand=by_hand)) as log:
        own = pristine_builtins.own_pid()
        log.write("start", pid=own)
        try:
            module, _, function = request.target.partition(":")
            getattr(importlib.import_module(module), function)(request.payload, log)
        except BaseException as error:  # SystemExit and KeyboardInterrupt end a rank like any other error
            fail(request, log, error)
        if pristine_builtins.own_pid() != own:
            # A child that the target forked and that came back in its place. The rank may be gone: its last word is its own, as
            # are the answers to whoever waits for it.
            flush()
            pristine_builtins.leave(0)
        log.write("done", pid=own)


def fail(request: Request, log: RankLog, error: BaseException) -> NoReturn:
    """Report that error, if the rank did not report one before, and end this process."""
    if not any(event["event"] == "error" for event in read_events(request.directory, log.rank)):
        tell(log, error)
    leave_failed(request.directory, request.world_size)


def _use_threads() -> None:
    """As many threads as the environment says: OpenMP read its variable when the fork server loaded it."""
    import torch

    wanted = os.environ.get(_THREADS, "")
    count = int(wanted) if wanted.isdecimal() else len(os.sched_getaffinity(0))
    if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        # A torch that starts asks MKL, which uses no more threads than there are cores (hyperthreads are none).
        count = min(count, psutil.cpu_count(logical=False) or count)
    torch.set_num_threads(count)


def leave_failed(directory: str | Path, world_size: int) -> NoReturn:
    """End this rank so that its peers notice, without barrier and without destroying the process group.

    ``directory`` is the request's, for which there are so many ranks.

    Both would wait for peers who may be waiting for this rank. The grace lets ranks that fail at the same moment
    report their own failure, not the loss of this peer.
    """
    ask_where([read_events(directory, rank) for rank in range(world_size)])
    clock.wait_until(
        lambda: all(has_ended(read_events(directory, rank)) for rank in range(world_size)), GRACE, every=0.01
    )
    flush()
    pristine_builtins.leave(1)


def tell(log: RankLog, error: BaseException) -> None:
    """Report that error."""
    text = "".join(pristine_builtins.format_exception(error))
    log.error(type(error).__name__, message_of(error), text, lost=lost_peer(error))


def message_of(error: BaseException) -> str:
    """What it says in one line, or in as many as a SyntaxError has."""
    return explained("".join(pristine_builtins.format_exception_only(error)).strip())


def flush() -> None:
    """Have what Python holds back of this process's output written."""
    # A test may have put others in the place of the first two.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]  # None, without a console


if __name__ == "__main__":
    # Default dispositions, as a warm rank has them: torchrun's agent ends ranks by SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main(sys.argv[1], by_hand="--by-hand" in sys.argv)
