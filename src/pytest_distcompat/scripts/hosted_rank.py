"""A rank makes itself known: who it is, that it started, how it ended. In processes that somebody else's launcher starts.

A rank is the process that has RANK in its environment, as torchrun, accelerate and deepspeed give it, or that becomes one
by ``init_process_group`` (``mp.spawn``, mpirun). Its children are none, whatever they inherit.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pytest_distcompat.scripts import guard
from pytest_distcompat.scripts.environment import RANK_PID, RUN

if TYPE_CHECKING:
    from pytest_distcompat.launch import RankLog

#: The frame in which the exception that ends a process was last: its main module, or what runs ``python -m``.
_OUTERMOST = frozenset({"<module>", "_run_module_as_main"})


class HostedRank:
    """One rank's word to the parent."""

    def __init__(self, directory: Path, rank: int) -> None:
        from pytest_distcompat.launch import RankLog

        self.directory = directory
        self.rank = rank
        self.pid = os.getpid()
        self.log: RankLog = RankLog(directory, rank)
        self._said = False
        #: The last ``sys.exit``, which somebody may have caught, and the exception that was being handled then.
        self._exit: SystemExit | None = None
        self._cause: BaseException | None = None

    def here(self) -> bool:
        """Whether this is the rank itself, not a process that was forked from it."""
        return os.getpid() == self.pid

    def begin(self) -> None:
        """Say so, and see to it that the end is told, whichever it is."""
        guard.report_to(self._probe_failed)
        from pytest_distcompat.launch.process import STACK_SIGNAL

        # Files of their own, kept open: at the time they are needed this process may be unable to open one.
        faulthandler.register(STACK_SIGNAL, file=self._open("stack"), all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._open("fault"))
        # Who is ended by SIGTERM cannot say so otherwise; the signal then does what it would have done.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, file=self._open("ended"), all_threads=False, chain=True)
        self._watch_exit()
        self.log.write("start", pid=self.pid, python=sys.executable, argv=list(sys.orig_argv), cwd=str(Path.cwd()))

    def _probe_failed(self, where: str, text: str) -> bool:
        if not self.here():
            return False
        self.log.write("probe failed", where=where, text=text)
        return True

    def _open(self, kind: str) -> Any:
        return (self.directory / f"rank-{self.rank}.{kind}").open("w", encoding="utf-8")

    def _watch_exit(self) -> None:
        hook = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
            guard.attempt("sys.excepthook", self._fail_in_main, error, trace, always=True)
            hook(kind, error, trace)

        def exit_(status: Any = None, /) -> None:
            self._exit, self._cause = SystemExit(status), sys.exc_info()[1]
            raise self._exit

        sys.excepthook, sys.exit = excepthook, exit_  # type: ignore[assignment]  # declared to take its argument by name too
        self._hook = excepthook
        end = guard.guarded("the end of the process", self.end, always=True)
        atexit.register(end)
        # What multiprocessing forks leaves without a call to atexit's functions.
        if "multiprocessing.util" in sys.modules:
            from multiprocessing import util

            util.Finalize(None, end, exitpriority=-100)

    def _fail_in_main(self, error: BaseException, trace: TracebackType | None) -> None:
        if _ends_process(trace):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The last word of a rank that raised."""
        from pytest_distcompat.launch.peers import lost_peer

        if self.here() and not self._said:
            self._said = True
            message = "".join(traceback.format_exception_only(error)).strip()
            text = "".join(traceback.format_exception(error))
            self.log.error(type(error).__name__, message, text, lost=lost_peer(error))

    def heard(self, event: str, rank: int) -> bool:
        """Whether that rank has told of such an event."""
        from pytest_distcompat.launch.request import read_events

        return any(one["event"] == event for one in read_events(self.directory, rank))

    def leave(self) -> None:
        """Be gone at once, and well: as a preempted rank is, without atexit functions and without a word to its peers."""
        self._said = True
        self.log.write("done")
        os._exit(0)

    def end(self) -> None:
        """The last word of a rank that leaves, as far as Python can tell why it does."""
        if self._said or not self.here():
            return
        finish()
        error = sys.exc_info()[1]
        if error is None and self._exit is not None and _ends_process(self._exit.__traceback__):
            error = self._exit
        if error is None and sys.excepthook is not self._hook:
            # Somebody replaced it (rich, a debugger): then Python's own note of what ended the main module counts.
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        code = 0
        if isinstance(error, SystemExit):
            # A text as exit status is printed, and stands for 1.
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            # ``sys.exit(1)`` in an ``except``, as mp.spawn has it, tells of the exception.
            error = self._cause if error is self._exit and code else None
        if error is not None:
            self.fail(error)
            return
        self._said = True
        if code:
            self.log.write("exit", code=code)
        else:
            self.log.write("done")


def _ends_process(trace: TracebackType | None) -> bool:
    """Whether an exception with that traceback got as far as the main module: C code may have one printed that ends nothing.

    A ``sys.exit(3)`` that the main module itself catches cannot be told from one that it lets pass, and counts as an end.
    """
    return trace is None or trace.tb_frame.f_code.co_name in _OUTERMOST


#: What is to be done before the last word; the recorder puts itself here.
_before_end: list[Any] = []


def before_end(function: Any) -> None:
    """Call it once, when the rank leaves well or not, while its log can still be written."""
    _before_end.append(function)


def finish() -> None:
    """Do what was to be done before the end."""
    while _before_end:
        guard.attempt("the end of the process", _before_end.pop())


_present: HostedRank | None = None


def current_rank() -> HostedRank | None:
    """This process's, if it is a rank."""
    return _present if _present is not None and _present.here() else None


def claim(rank: int) -> HostedRank | None:
    """Be that rank; None if this process is the child of one, or another process is it already.

    One process may follow another as the same rank (a shell script that prepares, then trains): the last one counts,
    if all before it ended well. So does a program that follows another in the same process (``os.execv``).
    """
    global _present  # noqa: PLW0603 - a process is one rank
    if current_rank() is not None:
        return _present
    if os.environ.get(RANK_PID, "") not in {"", str(os.getpid())}:
        return None
    directory = Path(os.environ[RUN])
    mark = directory / f"rank-{rank}.claim"
    try:
        descriptor = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        if mark.read_text(encoding="ascii") != str(os.getpid()) and not _ended_well(directory, rank):
            return None
        (directory / f"rank-{rank}.jsonl").rename(directory / f"before-{os.getpid()}-rank-{rank}.jsonl")
        descriptor = os.open(mark, os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(descriptor, "w") as file:
        file.write(str(os.getpid()))
    os.environ[RANK_PID] = str(os.getpid())
    _present = HostedRank(directory, rank)
    _present.begin()
    return _present


def _ended_well(directory: Path, rank: int) -> bool:
    """Whether the process that was this rank is done."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        last = (directory / f"rank-{rank}.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return bool(json.loads(last)["event"] == "done")
    return False
