"""SIGTERM of the launcher, noticed at once whatever the main thread waits for.

torchrun sends SIGTERM to all ranks once one has failed, and kills them 30 s later. Under ``torchrun
-m pytest`` a rank uses that time to report. ``external_launch`` creates one ``Termination`` on each
rank, and the threads of ``lockstep`` ask how long ago the signal came (``since``).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from pytest_distcompat import clock
from pytest_distcompat.launch.process import do_nothing


class Termination:
    """A handler of SIGTERM that keeps the process alive until it has reported.

    It must be created in the main thread, which alone may set handlers.

    A Python handler runs only when the main thread returns from C, so it may come too late. But
    Python writes a byte for each signal to a file descriptor (``signal.set_wakeup_fd``) at once.
    The handler does nothing, and ``wait`` reads the byte.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        # The main thread and a watcher of ``lockstep`` read: the byte may be gone when the second
        # one gets there.
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._received_at: float | None = None
        signal.signal(signal.SIGTERM, do_nothing)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._in_child)

    @property
    def since(self) -> float:
        """Seconds since the signal came; 0 if it has not, or if ``wait`` has not yet noticed it."""
        if self._received_at is None:
            return 0.0
        # Never 0, which means that no signal came.
        return max(clock.now() - self._received_at, 1e-9)

    def wait(self, seconds: float) -> None:
        """Wait for the signal, at most so many seconds; ``since`` then says whether it came."""
        readable, _, _ = select.select([self._reading], [], [], seconds)
        if not readable:
            return
        with contextlib.suppress(BlockingIOError):
            signals = os.read(self._reading, 64)
            if signal.SIGTERM in signals and self._received_at is None:
                self._received_at = clock.now()

    def ignore(self) -> None:
        """Ignore SIGTERM from now on, also while the interpreter shuts down.

        ``Lockstep.close`` calls it at the end of the session. Python restores the default handler
        when it shuts down, so a late signal would end this process with another exit status.
        """
        # Only the main thread can set a handler. In another thread nothing is done, and nothing
        # needs to be: such a thread ends the process by os._exit, which restores no handler.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _in_child(self) -> None:
        """Restore the default handler in a forked child, such as a data loader's worker."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is do_nothing:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
