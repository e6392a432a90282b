"""What can go wrong, as exceptions.

The tree::

    DistcompatError
      UsageProblem          a wrong word in a matrix, an expectation or an option
      Incompatible          a claim of a check does not hold
        LateFailure         an unsupported cell was not refused at build, but failed later
      LifeFailure           a process group did not live to its end
        RankRaised          a rank raised an exception
        RankCrash           a rank exited or was killed by a signal
        GroupTimeout        the time limit ended the group
      LaunchFailure         the ranks could not be started at all
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


class RankRaised(LifeFailure):
    """A rank raised an exception."""


class RankCrash(LifeFailure):
    """A rank exited on its own, was killed by a signal, or never reported."""


class GroupTimeout(LifeFailure):
    """The time limit ended the group."""


class LaunchFailure(DistcompatError):
    """The ranks could not be started at all."""
