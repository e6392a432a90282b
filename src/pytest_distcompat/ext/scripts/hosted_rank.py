"""A rank of a script reports itself to the parent process: its number, its start and its end.

A *rank* is one of the processes that train together. In other runs of this project the parent
starts the ranks itself. The ranks of a script are started by a foreign launcher, such as torchrun
or ``mp.spawn``, so each has to say that it exists, and how it ends. It writes *events*, one a line,
to ``rank-0.jsonl`` in the directory of the run. The parent (``launch.hosting``) reads them while
the script runs, and combines the ends of all ranks to one report.

``claim(rank)`` is called by ``instrumentation`` in a process that has RANK in its environment, when
it starts, or in any process when it calls ``init_process_group``. Child processes of a rank, such
as workers of a DataLoader, inherit its environment and are no ranks.

The *probe* is all code that records a script from inside its processes, this module too. The
script must not notice an error of the probe: ``guard.attempt(where, function)`` calls a function
and logs what it raises. After the first error it calls nothing more, but for functions with
``always=True``: the end of the rank is logged in any case.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.scripts import guard
from pytest_distcompat.ext.scripts.environment import RANK_PID, RUN

if TYPE_CHECKING:
    from pytest_distcompat.launch.rank_log import RankLog

#: The outermost frame of an exception that ends a process: the main module, or the function that
#: runs ``python -m``.
_OUTERMOST = frozenset({"<module>", "_run_module_as_main"})


class HostedRank:
    """This process as a rank: it logs its start and its end for the parent.

    Args:
        directory: The directory of the run, for the log.
        rank: The number of the rank, from 0.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        from pytest_distcompat.launch.rank_log import RankLog

        self.directory = directory
        self.rank = rank
        self.pid = os.getpid()
        self.log: RankLog = RankLog(directory, rank)
        #: Whether the last event is written: a rank has one end.
        self._end_logged = False
        #: Is called before the end is logged. The ``Recorder`` writes its last snapshots then.
        self.before_end: Callable[[], None] = lambda: None
        #: The last ``sys.exit``, which the script may have caught, and the exception that was being
        #: handled then.
        self._exit: SystemExit | None = None
        self._cause: BaseException | None = None

    def is_this_process(self) -> bool:
        """Tell whether this process is the rank itself, and not a fork of it."""
        return os.getpid() == self.pid

    def begin(self) -> None:
        """Log the start, and install handlers that log the end of the process, whatever ends it."""
        # From now on a failure of the probe goes into the log of this rank.
        guard.report_to(self._probe_failed)
        from pytest_distcompat.events import Start
        from pytest_distcompat.launch.forensics.deaths import out_of_memory_kills
        from pytest_distcompat.launch.forensics.stacks import STACK_SIGNAL

        # faulthandler writes Python's stacks to files: ``rank-0.stack`` when the parent asks for
        # them by a signal, ``rank-0.fault`` at a crash, such as a segmentation fault. They are
        # opened now: at the time of a crash this process may be unable to open one.
        faulthandler.register(STACK_SIGNAL, file=self._open("stack"), all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._open("fault"))
        # A process that SIGTERM ends runs no Python code any more, but faulthandler still writes;
        # ``chain`` keeps the signal's effect. A script's own handler stays.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            faulthandler.register(
                signal.SIGTERM, file=self._open("ended"), all_threads=False, chain=True
            )
        self._watch_exit()
        self.log.write(
            Start(
                self.pid,
                oom_kills=out_of_memory_kills(),
                python=sys.executable,
                argv=tuple(sys.orig_argv),
                cwd=str(Path.cwd()),
            )
        )

    def _probe_failed(self, where: str, text: str) -> bool:
        """Log that the probe failed; False in a fork of the rank, whose log this is not."""
        if not self.is_this_process():
            return False
        from pytest_distcompat.ext.scripts.events import ProbeFailed

        self.log.write(ProbeFailed(where, text))
        return True

    def _open(self, kind: str) -> Any:
        """Open a file of this rank, such as ``rank-0.stack``."""
        path = self.directory / f"rank-{self.rank}.{kind}"
        return path.open("w", encoding="utf-8")

    def _watch_exit(self) -> None:
        """Wrap what ends a Python process, so that the end is logged.

        An exception that nobody catches calls ``sys.excepthook``. A ``sys.exit(3)`` does not, so it
        is noted when it is called. All processes that end in order run ``end`` by atexit.
        """
        hook = sys.excepthook

        def excepthook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
        ) -> None:
            if _ends_process(trace):
                guard.attempt("sys.excepthook", self.fail, error, always=True)
            hook(kind, error, trace)

        def exit_(status: Any = None, /) -> None:
            self._exit = SystemExit(status)
            # The exception that is being handled, if the call is inside an ``except``.
            self._cause = sys.exc_info()[1]
            raise self._exit

        sys.excepthook = excepthook
        # It is declared to take its argument by name too.
        sys.exit = exit_  # type: ignore[assignment]
        self._hook = excepthook
        end = guard.guarded("the end of the process", self.end, always=True)
        atexit.register(end)
        # Processes that multiprocessing forks exit without calling atexit's functions.
        if "multiprocessing.util" in sys.modules:
            from multiprocessing import util

            util.Finalize(None, end, exitpriority=-100)

    def fail(self, error: BaseException) -> None:
        """Log the exception that ended the rank, and whether it only says that a peer is gone."""
        from pytest_distcompat.events import Error
        from pytest_distcompat.launch.forensics.stacks import format_error
        from pytest_distcompat.launch.peers import lost_peer

        if self.is_this_process() and not self._end_logged:
            self._end_logged = True
            message = "".join(traceback.format_exception_only(error)).strip()
            self.log.write(
                Error(type(error).__name__, message, format_error(error), lost=lost_peer(error))
            )

    def exit_like_preempted(self) -> None:
        """Exit at once with code 0, as a preempted rank does, after the checkpoint of a round trip.

        A round trip is a test that stops a script and resumes it (``resume_roundtrip``). No atexit
        functions run, and the process group is not left.
        """
        from pytest_distcompat.events import Done

        self._end_logged = True
        self.log.write(Done())
        os._exit(0)

    def end(self) -> None:
        """Log how the rank ends, as far as Python knows the reason: atexit calls this.

        ``Done`` for a good end, ``Exit`` for a code other than 0, ``Error`` for an exception.
        """
        if self._end_logged or not self.is_this_process():
            return
        guard.attempt("the end of the process", self.before_end)
        error = self._ending_exception()
        code = 0
        if isinstance(error, SystemExit):
            code = _exit_code(error)
            if error is self._exit and code:
                # A ``sys.exit(1)`` inside an ``except``, as in mp.spawn: the exception being
                # handled is what went wrong. None outside of an ``except``.
                error = self._cause
            else:
                # Nothing but the code says how it ended.
                error = None
        if error is not None:
            self.fail(error)
            return
        from pytest_distcompat.events import Done, Exit

        self._end_logged = True
        if code:
            self.log.write(Exit(code))
        else:
            self.log.write(Done())

    def _ending_exception(self) -> BaseException | None:
        """Return the exception that ends the process now, as far as Python knows.

        A ``SystemExit`` is one too, also with code 0. None if the main module ran to its end.
        """
        error = sys.exc_info()[1]
        if error is None and self._exit is not None and _ends_process(self._exit.__traceback__):
            error = self._exit
        if error is None and sys.excepthook is not self._hook:
            # The script has replaced the hook (rich, a debugger), so use Python's own record of the
            # last exception.
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        return error


def _exit_code(error: SystemExit) -> int:
    """Return the code with which Python exits: 0 for None, 1 for a text, which it prints."""
    if isinstance(error.code, int):
        return error.code
    return int(error.code is not None)


def _ends_process(trace: TracebackType | None) -> bool:
    """Tell whether an exception with that traceback reached the main module, and ends the process.

    C code also calls ``sys.excepthook`` for exceptions that end nothing. Their traceback begins in
    some function.
    """
    # A ``sys.exit(3)`` that the main module itself catches looks the same, and counts as an end.
    return trace is None or trace.tb_frame.f_code.co_name in _OUTERMOST


#: The rank that this process has claimed. In a fork of the rank it is still the parent's.
_current: HostedRank | None = None


def current_rank() -> HostedRank | None:
    """Return the rank that this process is, None if it is none."""
    if _current is None or not _current.is_this_process():
        return None
    return _current


def claim(rank: int) -> HostedRank | None:
    """Make this process the rank of that number and return it.

    None for a child of a rank, or if another process is that rank already. Several processes, or
    programs in one process (``os.execv``), may be the rank one after the other if each ends well.
    """
    global _current  # noqa: PLW0603 - a process is one rank
    if current_rank() is not None:
        return _current
    own_pid = str(os.getpid())
    # A rank puts its pid into its environment. A child has inherited that of its parent.
    if os.environ.get(RANK_PID, "") not in {"", own_pid}:
        return None
    directory = Path(os.environ[RUN])
    # Two processes may claim the rank at the same time: O_EXCL lets only one of them make the file,
    # which has its pid.
    mark = directory / f"rank-{rank}.claim"
    try:
        descriptor = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        claimed_by = mark.read_text(encoding="ascii")
        if claimed_by != own_pid and not _ended_well(directory, rank):
            return None
        # The log of the program before this one is put aside: each has a log of its own.
        log = directory / f"rank-{rank}.jsonl"
        log.rename(directory / f"before-{own_pid}-rank-{rank}.jsonl")
        descriptor = os.open(mark, os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(descriptor, "w") as file:
        file.write(own_pid)
    os.environ[RANK_PID] = own_pid
    _current = HostedRank(directory, rank)
    _current.begin()
    return _current


def _ended_well(directory: Path, rank: int) -> bool:
    """Tell whether the log of that rank says that it ended well."""
    from pytest_distcompat.events import Done
    from pytest_distcompat.launch.rank_log import read_events

    # An empty list if the log has no event.
    last_events = read_events(directory, rank)[-1:]
    return any(isinstance(event, Done) for event in last_events)
