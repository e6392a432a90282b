"""The main function of every rank: set the process up, do one request, report how it ended.

A request (``request.Request``) names the function to call on each rank, as ``worker:run`` for a
suite's run. The rank gets the path of its file. It logs ``Start``, calls the function, and logs
``Done`` or ``Error`` to its file ``rank-0.jsonl``, which the parent reads. The rank's number comes
from the environment: torchrun's agent, which starts and watches the ranks, sets ``RANK``.

The main function is called in three ways:

- ``forked``: on a warm rank, which is forked from a fork server, a process that has imported torch;
- ``main``: on a rank that the agent spawns because the fork server must not be forked from;
- as a program, by torchrun: ``torchrun --nproc-per-node 2 -m pytest_distcompat.launch.rank
  request.json``. The module ``torchrun`` does so, and so does a user who repeats a run by hand,
  with ``--by-hand`` and perhaps ``--pdb 1``.

A test may have patched builtins when its rank reports how it ended. So the rank reports by the
functions of ``pristine_builtins``, which were bound before.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import math
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from pytest_distcompat import clock
from pytest_distcompat.events import Done, Error, Event, Start, has_ended, of_kind, pids_of
from pytest_distcompat.excerpt import explained
from pytest_distcompat.launch import pristine_builtins, randomness, unimported
from pytest_distcompat.launch.forensics import deaths, flight_recorder
from pytest_distcompat.launch.forensics.stacks import (
    STACK_SIGNAL,
    format_error,
    request_stack,
    stack_file,
)
from pytest_distcompat.launch.peers import lost_peer
from pytest_distcompat.launch.process import die_with_parent, flush, run_exit_functions
from pytest_distcompat.launch.rank_log import LogReader, RankLog, read_events
from pytest_distcompat.launch.request import Request, set_import_path

#: How long a failed rank waits for the others to report a failure of their own before it ends, and
#: their connections to it with it; in seconds.
GRACE = 0.3

#: The option of ``python -m pytest_distcompat.launch.rank`` with the rank in which the user wants a
#: debugger.
DEBUG_OPTION = "--pdb"
#: The environment variable with the number of threads that OpenMP, and so torch, uses.
_THREADS = "OMP_NUM_THREADS"
#: The start method of multiprocessing (``spawn``, say) that the user's modules have set in the fork
#: server that imported them; None if they set none. ``preload`` sets it.
start_method: str | None = None


def main(path: str, *, by_hand: bool = False, debugged: int | None = None) -> None:
    """Run one request on this rank; it returns only if all went well.

    Args:
        path: The file of the request.
        by_hand: Whether a user runs it in a terminal: errors are shown there too.
        debugged: The rank on which the user wants a debugger; None for no rank.
    """
    request = Request.read(path)
    die_with_parent()
    lead_session()
    number = int(os.environ["RANK"])
    # The file is opened now, because at the time of a hang this process may be unable to open one.
    # It is for appending: the watchdog empties the file before it requests stacks again.
    stacks = stack_file(request.directory, number).open("a", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    flight_recorder.install_handler(request.directory, number)
    # A forked process has the start method by which it was started (``forkserver``). A rank of
    # torchrun has Python's default, or what a module of the user's sets.
    multiprocessing.set_start_method(start_method, force=True)
    prepare(request)
    # All forks have inherited the same random states: each gets its own, as a fresh process has.
    randomness.renew()
    perform(request, by_hand=by_hand, debugged=debugged)
    flush()


def lead_session() -> None:
    """Make this process the leader of a session and a process group of its own.

    torchrun starts each rank so. A signal that a test sends to its own group then reaches nothing
    but the rank and its children. torchrun passes ``start_new_session``
    (torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py).
    """
    if os.getpgid(0) != os.getpid():
        os.setsid()


def forked(path: str) -> None:
    """Run one request on a forked rank.

    Such a rank ends by ``os._exit``, so the exit functions of its interpreter are called before.
    """
    # multiprocessing calls a ``Finalize`` at the end of the process. The exit functions are not
    # called right after ``main``, because an exit function may end the process, and torch's agent
    # must see before that this function has returned.
    multiprocessing.util.Finalize(None, run_exit_functions, exitpriority=-1)
    # By this name code distinguishes a process of a user from one of multiprocessing's workers.
    multiprocessing.current_process().name = "MainProcess"
    forget_parent()
    # Modules that the fork server has imported, and the user's code has not, are no attributes of
    # their packages here, as in a fresh process.
    unimported.hide_again()
    main(path)


def forget_parent() -> None:
    """Have ``multiprocessing.parent_process()`` return None, as in a process that a user starts.

    multiprocessing has only private names for it; ``tests/launch/test_private_names.py`` fails when
    they go away.
    """
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # noqa: SLF001 - see the docstring
    # The number of this process among its parent's children. The names of its own children would
    # begin with it: ``Process-1:1``.
    multiprocessing.current_process()._identity = ()  # noqa: SLF001 - see the docstring


def prepare(request: Request) -> None:
    """Give this process the settings of the process that sent the request.

    These are the environment, the number of threads, the working directory, the command line
    (``sys.argv``) and the import path. A forked rank has those of the fork server, which may be
    older.
    """
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
    set_import_path(request.import_path)


def perform(request: Request, *, by_hand: bool = False, debugged: int | None = None) -> None:
    """Call the target of the request. A failure is reported and ends this process."""
    number = int(os.environ["RANK"])
    with contextlib.closing(
        RankLog(request.directory, number, by_hand=by_hand, debugged=debugged)
    ) as log:
        pid = pristine_builtins.own_pid()
        # With the number of processes that the kernel has killed for lack of memory so far: if this
        # rank dies and the number has grown, that is the cause.
        log.write(Start(pid, deaths.out_of_memory_kills()))
        try:
            module, _, function = request.target.partition(":")
            target = getattr(importlib.import_module(module), function)
            target(request.payload, log)
        except BaseException as error:
            # SystemExit and KeyboardInterrupt end a rank like any other error.
            debug(log, error)
            # The target may have logged an error itself, with more details. The first one counts.
            if not of_kind(Error, read_events(request.directory, number)):
                report_error(log, error)
            leave_failed(request.directory, request.world_size)
        if pristine_builtins.own_pid() != pid:
            # This is a child that the target forked, and that came back here in the rank's place.
            # The rank itself may be gone: only it may log that it is done, and answer the parent.
            flush()
            pristine_builtins.exit_now(0)
        log.write(Done(pid))


def debug(log: RankLog, error: BaseException) -> None:
    """Start the debugger at an error of the rank to debug.

    Another rank waits until that one has ended. A failed rank that ended at once would take the
    rank to debug with it. Does nothing in a run without a rank to debug.
    """
    began = clock.now()
    debugged = log.debugged
    if debugged is None:
        return
    if log.rank == debugged:
        import pdb  # noqa: T100 - the user asked for it

        message = pristine_builtins.format_exception_only(error)[-1].strip()
        print(f"\nrank {log.rank}: {message}")  # noqa: T201 - the user looks at the terminal
        pdb.post_mortem(error.__traceback__)
        return
    logs = LogReader(log.path.parent, [debugged])

    def debugged_has_ended() -> bool:
        # The log of an earlier run may still be there.
        events = [event for event in logs.read()[debugged] if event.time > began]
        return has_ended(events)

    clock.wait_until(debugged_has_ended, math.inf, every=0.1)


def _use_threads() -> None:
    """Use as many threads as the environment now says.

    OpenMP read its variable when the fork server loaded the library, and does not read it again.
    """
    import torch

    wanted = os.environ.get(_THREADS, "")
    count = int(wanted) if wanted.isdecimal() else len(os.sched_getaffinity(0))
    if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        # As torch does at its start: it takes MKL's number, which is at most the number of physical
        # cores.
        count = min(count, psutil.cpu_count(logical=False) or count)
    torch.set_num_threads(count)


def leave_failed(directory: str | Path, world_size: int) -> NoReturn:
    """End this rank so that its peers notice.

    There is no barrier, and the process group is not destroyed. Both would wait for peers who may
    be waiting for this rank. The grace lets ranks that fail at the same moment report their own
    failure, not the loss of this peer.
    """
    logs = LogReader(directory, range(world_size))
    request_straggler_stacks(logs.read())

    def all_have_ended() -> bool:
        events_by_rank = logs.read()
        return all(map(has_ended, events_by_rank.values()))

    clock.wait_until(all_have_ended, GRACE, every=0.01)
    flush()
    pristine_builtins.exit_now(1)


def report_error(log: RankLog, error: BaseException) -> None:
    """Log the error, and whether it only says that another rank is gone (``lost``).

    The first line of its message says what the rank was doing, if the log has that.
    """
    kind = type(error).__name__
    message = message_of(error)
    if log.doing:
        # Not by another exception raised from this one: a debugger would stop at that.
        first_line, newline, rest = message.partition("\n")
        message = f"{first_line} ({log.doing}){newline}{rest}"
    log.write(Error(kind, message, format_error(error), lost=lost_peer(error)))


def message_of(error: BaseException) -> str:
    """Return type and message of an error: ``ValueError: no such layer``.

    It is one line, or as many as a SyntaxError has.
    """
    text = "".join(pristine_builtins.format_exception_only(error)).strip()
    # The message of an error that only says that a debugger quit gets the likely cause.
    return explained(text)


#: Messages of gloo, the store, ``monitored_barrier`` and NCCL's watchdog when they give up waiting.
_GAVE_UP = re.compile(
    r"Timed out waiting \d+ms|wait timeout after|failed to pass monitoredBarrier|"
    r"Watchdog caught collective operation timeout"
)


def request_straggler_stacks(events: Mapping[int, Sequence[Event]]) -> None:
    """Have the ranks that still run write their stacks, if this rank gave up waiting for them.

    Its collective has timed out, and the report should say where the other ranks were. The agent
    ends them as soon as it sees that this rank is gone, and then it is too late. Of several ranks
    that gave up only the first does it.

    Args:
        events: By rank, what it has logged, this rank's error included.
    """
    gave_up = []
    for logged in events.values():
        for error in of_kind(Error, logged):
            if _GAVE_UP.search(error.message):
                gave_up.append(error)
    first = min(gave_up, key=lambda error: error.time, default=None)
    pids = pids_of(events)
    if first is None or pids.get(first.rank) != os.getpid():
        return
    for rank, pid in pids.items():
        if not has_ended(events[rank]):
            request_stack(pid)


if __name__ == "__main__":
    # Default dispositions, as a warm rank has them: torchrun's agent ends ranks by SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("request")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument(DEBUG_OPTION, type=int, dest="debugged")
    arguments = parser.parse_args()
    main(arguments.request, by_hand=arguments.by_hand, debugged=arguments.debugged)
