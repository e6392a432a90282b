"""SIGTERM to pytest itself, from a scheduler that takes the machines of its session away."""

from __future__ import annotations

import signal
import threading

import pytest

from pytest_distcompat.launch.process import do_nothing


def install(config: pytest.Config) -> None:
    """Have SIGTERM end the session as Ctrl-C does, unless somebody else handles it."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _interrupt)
        config.add_cleanup(_restore)


def _interrupt(number: int, frame: object) -> None:
    # Schedulers repeat it, and reports are being written then.
    signal.signal(signal.SIGTERM, do_nothing)
    raise KeyboardInterrupt("SIGTERM")


def _restore() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
