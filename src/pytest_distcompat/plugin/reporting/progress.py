"""Progress line with the runs that are running: below the terminal's last line, or as a log line each minute."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.excerpt import visible
from pytest_distcompat.report.document import Report

#: Seconds between two updates of the line, and the number of runs that it names.
RENEWED = 0.5
NAMED = 4
#: Without a terminal: seconds between two lines at least, and the age in seconds from which a run is named.
HEARTBEAT = 60.0

_CLEAR_BELOW = "\n\x1b[2K"
_UP = "\x1b[1A"


#: From which share of the expected work the pace of this session counts, and not that of the earlier one.
OWN_PACE = 0.1


class Forecast:
    """Guess of how long the rest of a session takes, from how long its items took in an earlier one."""

    def __init__(self, earlier: Report | None, items: Iterable[str]) -> None:
        took = {result.nodeid: result.seconds for result in earlier.results} if earlier else {}
        self._known = bool(sum(took.values()))
        mean = sum(took.values()) / len(took) if self._known else 1.0
        self._work = {item: took.get(item, mean) for item in items}
        #: Seconds of a session for a second of its items: less than 1 with several workers.
        self._pace = (earlier.session.get("seconds", 0.0) if earlier else 0.0) / (sum(took.values()) or 1.0)

    def left(self, ended: Collection[str], passed: float) -> float | None:
        """Return the seconds that the rest takes, after the seconds that have passed; None if nothing is known."""
        total = sum(self._work.values())
        done = sum(self._work.get(item, 0.0) for item in ended)
        if done and (not self._known or done >= OWN_PACE * total):
            return passed / done * (total - done)
        return self._pace * (total - done) if self._known else None


class Progress:
    """A thread that shows progress, in the process that has the terminal. It reads the store, with and without xdist.

    pytest prints in hooks. They wait for the thread, and the line is removed before they print.
    """

    def __init__(
        self,
        config: pytest.Config,
        runs: Path,
        counts: Callable[[], tuple[int, int]] = lambda: (0, 0),
        left: Callable[[float], float | None] = lambda _: None,
        waits: Callable[[], str] = str,
    ) -> None:
        self._runs = runs
        #: Return how many checks have ended, and of how many; how long the rest takes, after so many seconds; and what the next
        #: run waits for, if it has to wait for devices.
        self._counts, self._left, self._waits = counts, left, waits
        self._began = clock.now()
        self._config = config
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: int | None = None
        self._drawn = False
        self._since = clock.wall()
        self._next_line = clock.now() + HEARTBEAT

    def start(self) -> None:
        """Start the thread, unless the output is quiet. Call it only where pytest's capture is suspended."""
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        # With -s tests write to the terminal themselves; -qq asks for as little output as possible.
        quiet = self._config.getoption("capture", "fd") == "no" or self._config.getoption("verbose") < -1
        if terminal is None or quiet or self._thread is not None:
            return
        try:
            # A duplicate: while a test runs, pytest replaces the descriptor of stdout by a file.
            self._file = os.dup(sys.stdout.fileno())
        except (OSError, ValueError, AttributeError):
            return
        self._tty = os.isatty(self._file)
        self._thread = threading.Thread(target=self._run, name="distcompat-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and remove the line."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._clear()
            self._thread = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _run(self) -> None:
        from pytest_distcompat.evidence.store import running

        finished: set[str] = set()
        while not self._stopped.wait(RENEWED):
            # An error here must not affect tests.
            with contextlib.suppress(Exception):
                runs = [*running(self._runs, finished, self._since)]
                with self._lock:
                    if self._tty:
                        self._draw(runs)
                    else:
                        self._write_log_line(runs)

    def _draw(self, runs: list[Any]) -> None:
        writer = self._config.get_terminal_writer()
        width = writer.fullwidth
        column = writer.width_of_current_line % width
        # xdist's controller writes about its workers before the first test, outside hooks.
        starts = not self._counts()[0] and not self._config.pluginmanager.hasplugin("dsession")
        waits = "" if runs else self._waits()
        if not (runs or starts or waits) or (writer.width_of_current_line and not column):
            # At the right edge terminals differ in where they put the cursor.
            self._clear()
            return
        named = [visible(str(run)) for run in runs[:NAMED]]
        named = named or [visible(waits) or "fork servers start: they import the libraries"]
        named += [f"and {len(runs) - NAMED} more"] if len(runs) > NAMED else []
        text = self._overall() + "; ".join(named)
        self._write(f"{_CLEAR_BELOW}  {text}"[: len(_CLEAR_BELOW) + width - 1] + f"{_UP}\x1b[{column + 1}G")
        self._drawn = True

    def _overall(self) -> str:
        """Return how many checks have ended, for how long the session runs, and how long it takes about."""
        passed, (ended, total) = clock.now() - self._began, self._counts()
        left = self._left(passed)
        return f"{ended} of {total} checks, {passed:.0f} s{'' if left is None else f', about {left:.0f} s left'}; "

    def _clear(self) -> None:
        if self._drawn:
            writer = self._config.get_terminal_writer()
            column = writer.width_of_current_line % writer.fullwidth
            self._write(f"{_CLEAR_BELOW}{_UP}\x1b[{column + 1}G")
            self._drawn = False

    def _write_log_line(self, runs: list[Any]) -> None:
        long = [run for run in runs if run.seconds >= HEARTBEAT]
        if long and clock.now() >= self._next_line:
            self._next_line = clock.now() + HEARTBEAT
            newline = "\n" if self._config.get_terminal_writer().width_of_current_line else ""
            self._write(f"{newline}distcompat: {'; '.join(visible(str(run)) for run in long[:NAMED])}\n")

    def _write(self, text: str) -> None:
        if self._file is not None:
            os.write(self._file, text.encode("utf-8", "replace"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self) -> Generator[None, Any, Any]:
        """Remove the line before pytest writes a dot or an outcome."""
        with self._lock:
            self._clear()
            result = yield
            self._next_line = clock.now() + HEARTBEAT
            return result

    #: Before pytest writes the item's name (-v), and the percentage.
    pytest_runtest_logstart = pytest_runtest_logfinish = pytest_runtest_logreport
