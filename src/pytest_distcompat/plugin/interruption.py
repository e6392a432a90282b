"""SIGTERM to pytest itself, from a scheduler that takes the machines of its session away.

By default SIGTERM ends pytest at once: there is no report, and processes on other machines stay. So
in sessions that write a report, or have runs on other machines, the plugin's hooks call
``install``.
"""

from __future__ import annotations

import signal
import threading

import pytest

from pytest_distcompat.launch.process import do_nothing


def install(config: pytest.Config) -> None:
    """Have SIGTERM end the session as Ctrl-C does, unless somebody else handles it.

    Python sets signal handlers in the main thread only. pytest may run in another one.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _interrupt)
        config.add_cleanup(_restore)


def _interrupt(number: int, frame: object) -> None:
    """Handle the signal: pytest takes the exception for Ctrl-C."""
    # Schedulers repeat the signal. By then pytest writes its reports, which it must not interrupt.
    signal.signal(signal.SIGTERM, do_nothing)
    raise KeyboardInterrupt("SIGTERM")


def _restore() -> None:
    """Let SIGTERM end the process again, once pytest is done."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
