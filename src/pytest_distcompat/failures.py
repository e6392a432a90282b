"""Exceptions of this package; ``LateFailure`` is an ``Incompatible``, all are a ``DistcompatError``."""

from __future__ import annotations


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
