"""What can go wrong, as exceptions.

The tree::

    DistcompatError
      UsageProblem          a wrong word in a matrix, an expectation or an option
      Incompatible          a claim of a check does not hold
        LateFailure         an unsupported cell was not refused at build, but failed later
      LifeFailure           a process group did not live to its end
"""

from __future__ import annotations


class DistcompatError(Exception):
    """Root of all that this package raises."""


class UsageProblem(DistcompatError, ValueError):
    """A wrong word in a matrix, an expectation or an option; the message lists the right ones."""


class Incompatible(DistcompatError, AssertionError):
    """A claim of a check does not hold. The message has one line a finding: *where: what is wrong; what was expected*."""


class LateFailure(Incompatible):
    """An unsupported cell failed, but only after ``build``: the user pays for the wait."""


class LifeFailure(DistcompatError):
    """A process group did not live to its end."""
