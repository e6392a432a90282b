"""Exceptions of this package: all are a ``DistcompatError``.

``LateFailure`` is an ``Incompatible``.
"""

from __future__ import annotations

from typing import Any


class DistcompatError(Exception):
    """Base class of all exceptions of this package.

    ``hard``: a crash, a hang or a leak, which no known issue excuses.
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
    """Tell whether pytest hides our frames of an error.

    It hides those of an error that we raise on purpose, so that it shows the line of the test. A
    module with ``__tracebackhide__ = hides_frames`` shows its frames for all other errors: those
    are bugs of ours.
    """
    return isinstance(excinfo.value, DistcompatError)
