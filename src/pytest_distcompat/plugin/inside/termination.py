"""Notices at once that the launcher ends this rank, whatever its main thread waits for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType

from pytest_distcompat import clock


class Termination:
    """A handler of SIGTERM that lets the process live until it has said what it knows. Made in the main thread.

    torchrun ends all ranks by SIGTERM once one has failed, and kills them 30 s later. A handler of Python's runs only when the
    main thread comes back from C; the byte that Python writes for it (``signal.set_wakeup_fd``) is there at once.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._came: float | None = None
        signal.signal(signal.SIGTERM, _go_on)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._in_child)

    @property
    def since(self) -> float:
        """How many seconds ago it came; 0 if it has not."""
        return 0.0 if self._came is None else max(clock.now() - self._came, 1e-9)

    def wait(self, seconds: float) -> None:
        """Wait so long at most for it to come."""
        readable, _, _ = select.select([self._reading], [], [], seconds)
        if readable and signal.SIGTERM in os.read(self._reading, 64) and self._came is None:
            self._came = clock.now()

    def ignore(self) -> None:
        """From here to the end of the process. Python takes its own handlers away before it has ended."""
        # In another thread it cannot be set; what ends the process there does not wait for Python.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _in_child(self) -> None:
        """A worker of a data loader is ended by SIGTERM: it must die of it."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is _go_on:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _go_on(number: int, frame: FrameType | None) -> None:
    pass
