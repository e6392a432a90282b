"""Progress line with the runs that are running.

On a terminal it is below pytest's last line and is renewed twice a second::

      12 of 42 checks, 31 s, about 60 s left; fsdp2-fp32-w2 train: step 7/28, 3 s of 300 s

Elsewhere, as in CI, a line is logged each minute, and only about runs that take long. A *run* is
one process group from start to end, which trains in a *cell*, a configuration such as
``fsdp2-fp32-w2``. Each run has a directory in the *store*, a directory that all processes of the
session share. So the process with the terminal knows the runs of all xdist workers by reading it.

``Results``, which collects the verdicts of checks in that process, registers ``Progress`` as a
pytest plugin and starts its thread once the tests are collected. ``Forecast`` guesses how long the
rest takes.
"""

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
#: Without a terminal: seconds between two lines at least, and the age in seconds from which a run
#: is named.
HEARTBEAT = 60.0

#: Control sequences of terminals: go to the next line and clear it; go up a line.
_CLEAR_BELOW = "\n\x1b[2K"
_UP = "\x1b[1A"

#: The part of the expected work that must be done before the forecast goes by the pace of this
#: session; until then it goes by that of the earlier one.
OWN_PACE = 0.1


class Forecast:
    """Guess of how long the rest of a session takes, by how long its items took earlier.

    Args:
        earlier: The report of an earlier session; None without one.
        items: The node ids of the items of this session.
    """

    def __init__(self, earlier: Report | None, items: Iterable[str]) -> None:
        seconds: dict[str, float] = {}
        session_seconds = 0.0
        if earlier:
            seconds = {result.nodeid: result.seconds for result in earlier.results}
            session_seconds = earlier.session.get("seconds", 0.0)
        total = sum(seconds.values())
        #: Whether there are durations of an earlier session; without them all items count alike.
        self._known = bool(total)
        mean = 1.0
        #: Seconds of a session for a second of its items. It is less than 1 if several workers run
        #: items at the same time. Not used unless durations are known.
        self._pace = session_seconds
        if self._known:
            mean = total / len(seconds)
            self._pace = session_seconds / total
        #: Each item to its expected seconds; an item that the report lacks takes the mean.
        self._work = {item: seconds.get(item, mean) for item in items}

    def left(self, ended: Collection[str], passed: float) -> float | None:
        """Return the seconds that the rest takes; None if nothing is known.

        Args:
            ended: The node ids of the items that have ended.
            passed: The seconds that have passed.
        """
        total = sum(self._work.values())
        done = 0.0
        for item in ended:
            done += self._work.get(item, 0.0)
        # By the pace of this session, once enough is done to know it.
        if done and (not self._known or done >= OWN_PACE * total):
            return passed / done * (total - done)
        # By the pace of the earlier session.
        if self._known:
            return self._pace * (total - done)
        return None


class Progress:
    """A thread that shows progress, in the process that has the terminal.

    pytest prints to the same terminal, in hooks. The hooks of this class run around those: they
    wait for the thread and remove the line before pytest prints.

    Args:
        config: The configuration of pytest.
        runs: The directory with the runs.
        counts: Returns how many checks have ended, and of how many.
        left: Returns how many seconds the rest takes, after so many seconds; None if unknown.
        waits: Returns what the next run waits for, if it has to wait for devices; else an empty
            text, as ``str()`` does.
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
        self._counts = counts
        self._left = left
        self._waits = waits
        self._began = clock.now()
        self._config = config
        #: Held by the thread while it draws, and by pytest's hooks while pytest prints.
        self._lock = threading.Lock()
        #: Set when the thread is to end.
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        #: The file descriptor of the terminal or the log; None before ``start``.
        self._file: int | None = None
        #: Whether the line is on the terminal now.
        self._drawn = False
        #: Runs that began before this time, in seconds since 1970, are of another session.
        self._since = clock.wall()
        #: The earliest time of the next log line.
        self._next_line = clock.now() + HEARTBEAT

    def start(self) -> None:
        """Start the thread, unless the output is quiet.

        Call it only where pytest's capture is suspended.
        """
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        # With -s tests write to the terminal themselves; -qq asks for as little output as possible.
        quiet = (
            self._config.getoption("capture", "fd") == "no"
            or self._config.getoption("verbose") < -1
        )
        if terminal is None or quiet or self._thread is not None:
            return
        try:
            # A duplicate: while a test runs, pytest replaces the descriptor of stdout by a file.
            self._file = os.dup(sys.stdout.fileno())
        except (OSError, ValueError, AttributeError):
            # stdout is closed, or an object without a descriptor: nothing can be shown.
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
        """Show progress until ``stop``: the function of the thread."""
        from pytest_distcompat.evidence.progress import running

        # The names of runs that have ended: ``running`` adds to it, and does not read them again.
        finished: set[str] = set()
        while not self._stopped.wait(RENEWED):
            # An error here must not affect tests.
            with contextlib.suppress(Exception):
                runs = list(running(self._runs, finished, self._since))
                with self._lock:
                    if self._tty:
                        self._draw(runs)
                    else:
                        self._write_log_line(runs)

    def _draw(self, runs: list[Any]) -> None:
        """Write the line below the last one of the terminal, and put the cursor back."""
        writer = self._config.get_terminal_writer()
        width = writer.fullwidth
        column = writer.width_of_current_line % width
        # At the right edge terminals differ in where they put the cursor.
        at_right_edge = writer.width_of_current_line > 0 and column == 0
        activity = self._activity(runs)
        if not activity or at_right_edge:
            self._clear()
            return
        line = f"{_CLEAR_BELOW}  {self._overall()}{activity}"
        # Cut at the terminal's width, so that it stays one line. The control sequence has no width.
        line = line[: len(_CLEAR_BELOW) + width - 1]
        to_column = f"\x1b[{column + 1}G"
        self._write(f"{line}{_UP}{to_column}")
        self._drawn = True

    def _activity(self, runs: list[Any]) -> str:
        """Return what goes on; empty if nothing does.

        That is the runs, or what the next run waits for, or that the session starts.

        Args:
            runs: The runs that are running, ``evidence.progress.Running``.
        """
        if runs:
            named = [visible(str(run)) for run in runs[:NAMED]]
            if len(runs) > NAMED:
                named.append(f"and {len(runs) - NAMED} more")
            return "; ".join(named)
        waits = visible(self._waits())
        if waits:
            return waits
        ended, _ = self._counts()
        # Not in xdist's controller (plugin ``dsession``): before the first test it writes about its
        # workers outside the hooks that remove the line.
        if ended == 0 and not self._config.pluginmanager.hasplugin("dsession"):
            return "fork servers start: they import the libraries"
        return ""

    def _overall(self) -> str:
        """Return how many checks have ended, the seconds passed, and about how many are left."""
        passed = clock.now() - self._began
        ended, total = self._counts()
        text = f"{ended} of {total} checks, {passed:.0f} s"
        seconds_left = self._left(passed)
        if seconds_left is not None:
            text += f", about {seconds_left:.0f} s left"
        return f"{text}; "

    def _clear(self) -> None:
        """Remove the line from the terminal, and put the cursor back."""
        if self._drawn:
            writer = self._config.get_terminal_writer()
            column = writer.width_of_current_line % writer.fullwidth
            to_column = f"\x1b[{column + 1}G"
            self._write(f"{_CLEAR_BELOW}{_UP}{to_column}")
            self._drawn = False

    def _write_log_line(self, runs: list[Any]) -> None:
        """Write a line about the runs that take long, at most once a minute."""
        named = []
        for run in runs:
            if run.seconds >= HEARTBEAT:
                named.append(visible(str(run)))
        if not named or clock.now() < self._next_line:
            return
        self._next_line = clock.now() + HEARTBEAT
        # Begin a new line, not behind the dots that pytest has written.
        newline = "\n" if self._config.get_terminal_writer().width_of_current_line else ""
        runs_text = "; ".join(named[:NAMED])
        self._write(f"{newline}distcompat: {runs_text}\n")

    def _write(self, text: str) -> None:
        if self._file is not None:
            os.write(self._file, text.encode("utf-8", "replace"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self) -> Generator[None, Any, Any]:
        """Remove the line before pytest writes a dot or an outcome.

        This hook wraps those of other plugins, so that the thread waits until all have printed.
        """
        with self._lock:
            self._clear()
            result = yield
            # pytest has just written to the log, which shows that the session goes on.
            self._next_line = clock.now() + HEARTBEAT
            return result

    #: The same before pytest writes an item's name (-v), and the percentage.
    pytest_runtest_logstart = pytest_runtest_logfinish = pytest_runtest_logreport
