"""Shows which runs run at this moment: a line below the terminal's last one; without a terminal, now and then a line."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.excerpt import visible

#: How often the line is renewed, in seconds, and how many runs it names.
RENEWED = 0.5
NAMED = 4
#: Without a terminal: how often at most a line is written, and how long a run must have lasted to be worth it, in seconds.
HEARTBEAT = 60.0

_CLEAR_BELOW = "\n\x1b[2K"
_UP = "\x1b[1A"


class Progress:
    """A thread of the process that talks to the user. It looks at the store, so that xdist makes no difference.

    pytest writes its own words in hooks; these wait for the thread, and the line is gone before they write.
    """

    def __init__(self, config: pytest.Config, runs: Path) -> None:
        self._runs = runs
        self._config = config
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: int | None = None
        self._shown = False
        self._since = clock.wall()
        self._next = clock.now() + HEARTBEAT

    def start(self) -> None:
        """Begin, if there is anybody to show it to; to be called where pytest's capture is suspended."""
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        # With -s the tests write to the terminal themselves, and with -qq nobody wants to know.
        quiet = self._config.getoption("capture", "fd") == "no" or self._config.getoption("verbose") < -1
        if terminal is None or quiet or self._thread is not None:
            return
        try:
            # Of our own: while a test runs, pytest has put a file in the place of this one.
            self._file = os.dup(sys.stdout.fileno())
        except (OSError, ValueError, AttributeError):
            return
        self._tty = os.isatty(self._file)
        self._thread = threading.Thread(target=self._run, name="distcompat-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; the line is gone."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._clear()
            self._thread = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _run(self) -> None:
        from pytest_distcompat.evidence import running

        over: set[str] = set()
        while not self._stop.wait(RENEWED):
            # Whatever goes wrong here, no test depends on it.
            with contextlib.suppress(Exception):
                found = [*running(self._runs, over, self._since)]
                with self._lock:
                    if self._tty:
                        self._draw(found)
                    else:
                        self._beat(found)

    def _draw(self, found: list[Any]) -> None:
        writer = self._config.get_terminal_writer()
        width = writer.fullwidth
        column = writer.width_of_current_line % width
        if not found or (writer.width_of_current_line and not column):
            # At the very edge of a line nobody knows where the cursor is.
            self._clear()
            return
        text = "; ".join(visible(str(one)) for one in found[:NAMED]) + (
            f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
        )
        self._write(f"{_CLEAR_BELOW}  {text}"[: len(_CLEAR_BELOW) + width - 1] + f"{_UP}\x1b[{column + 1}G")
        self._shown = True

    def _clear(self) -> None:
        if self._shown:
            writer = self._config.get_terminal_writer()
            column = writer.width_of_current_line % writer.fullwidth
            self._write(f"{_CLEAR_BELOW}{_UP}\x1b[{column + 1}G")
            self._shown = False

    def _beat(self, found: list[Any]) -> None:
        long = [run for run in found if run.seconds >= HEARTBEAT]
        if long and clock.now() >= self._next:
            self._next = clock.now() + HEARTBEAT
            begun = "\n" if self._config.get_terminal_writer().width_of_current_line else ""
            self._write(f"{begun}distcompat: {'; '.join(visible(str(one)) for one in long[:NAMED])}\n")

    def _write(self, text: str) -> None:
        if self._file is not None:
            os.write(self._file, text.encode("utf-8", "replace"))

    def _aside(self) -> Generator[None, Any, Any]:
        with self._lock:
            self._clear()
            result = yield
            self._next = clock.now() + HEARTBEAT
            return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logstart(self) -> Generator[None, Any, Any]:
        """With -v pytest writes the item's name."""
        return (yield from self._aside())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self) -> Generator[None, Any, Any]:
        """And a dot, or a word."""
        return (yield from self._aside())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logfinish(self) -> Generator[None, Any, Any]:
        """And how far it is."""
        return (yield from self._aside())
