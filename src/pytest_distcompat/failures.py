"""What can go wrong, as exceptions.

The tree::

    DistcompatError
      UsageProblem          a wrong word in a matrix, an expectation or an option
      Incompatible          a claim of a check does not hold
        LateFailure         an unsupported cell was not refused at build, but failed later
      RunFailedError           a process group did not live to its end
"""

from __future__ import annotations


class DistcompatError(Exception):
    """Root of all that this package raises.

    ``hard``: more happened than an exception (a crash, a hang, a leak), which no known issue excuses.
    """

    def __init__(self, text: str = "", *, hard: bool = False) -> None:
        super().__init__(text)
        self.hard = hard


class UsageProblem(DistcompatError, ValueError):
    """A wrong word in a matrix, an expectation or an option; the message lists the right ones."""


class Incompatible(DistcompatError, AssertionError):
    """A claim of a check does not hold. The message has one line a finding: *where: what is wrong; what was expected*."""


class LateFailure(Incompatible):
    """An unsupported cell failed, but only after ``build``: the user pays for the wait."""


class RunFailedError(DistcompatError):
    """A process group did not live to its end."""
