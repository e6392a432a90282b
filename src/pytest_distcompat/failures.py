"""Exceptions of this package. All are a ``DistcompatError``.

``UsageProblem`` is a mistake of the user. The others are the failures of pytest items, each a check
in a *cell* (a configuration such as ``fsdp2-fp32-w2``) or a test that runs on several processes:
``Incompatible`` for a check that fails, ``LateFailure`` (an ``Incompatible``) for an unsupported
cell that fails too late, and ``RunFailedError`` for a run that crashed or hung.
``plugin.suite.run`` and ``plugin.marked`` raise them.
"""

from __future__ import annotations

from typing import Any


class DistcompatError(Exception):
    """Base class of all exceptions of this package.

    Attributes:
        hard: Whether it is a crash, a hang or a leak, which no known issue excuses.
    """

    def __init__(self, text: str = "", *, hard: bool = False) -> None:
        super().__init__(text)
        self.hard = hard


class UsageProblem(DistcompatError, ValueError):
    """Invalid value in a matrix, an expectation or an option; the message lists the valid ones."""


class Incompatible(DistcompatError, AssertionError):
    """Claim of a check that does not hold.

    The message has one line for each finding: *where: what is wrong; what was expected*.
    """


class LateFailure(Incompatible):
    """Unsupported cell that failed only after ``build``, when the user had already waited."""


class RunFailedError(DistcompatError):
    """Process group that ended early."""


def hides_frames(excinfo: Any) -> bool:
    """Tell whether pytest hides the frames of this package in a traceback.

    A module sets ``__tracebackhide__ = hides_frames``; pytest calls it with the error's
    ``ExceptionInfo``. Frames are hidden if the error was raised on purpose, so that the user sees
    the line of the test. They are shown for any other error, which is a bug of this package.
    """
    return isinstance(excinfo.value, DistcompatError)
