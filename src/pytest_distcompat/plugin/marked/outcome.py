"""The one outcome of a marked test on all its ranks, and how pytest's report gets it.

A test with ``@pytest.mark.distcompat`` runs on *ranks*, the processes of one process group, and is
one item in pytest. This is the last of the three steps ``declare``, ``run``, ``outcome``:

1. After the ranks have ended, ``run.run_on_ranks`` calls ``merge.merge``, which makes an
   ``Outcome`` of what they logged, and puts it into the item's *stash*, pytest's dictionary for the
   data of plugins.
2. ``run`` ends the item's call as the outcome says: it skips, xfails, or raises
   ``Outcome.failure(...)``, so that pytest makes a report of it.
3. The hook ``pytest_runtest_makereport`` calls ``finish_report``, which puts the text and the
   output of the ranks into that report.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pytest_distcompat.plugin.marked.phase import Properties, Sections
from pytest_distcompat.plugin.reporting.representation import represent

#: The failure of a test that passed although no rank ran it: it has no outcome in its stash.
NOT_RUN = (
    "no rank ran this test: somebody else's pytest_runtest_call, or pytest_runtest_protocol, "
    "took its call over"
)


class RankFailure(Exception):
    """A failure of an item on its ranks; the message is the text to show.

    Attributes:
        hard: Whether it is a crash, hang or the like, which no xfail mark excuses.
    """

    def __init__(self, text: str, *, hard: bool) -> None:
        super().__init__(text)
        self.hard = hard


class RankAssertionFailure(RankFailure, AssertionError):
    """A failure of an item on its ranks, all of which failed by an assertion or ``pytest.fail``.

    Ranks that are only a consequence do not count. Reporters such as Allure call a test failed if
    its exception is an AssertionError, and broken otherwise.
    """


@dataclass(frozen=True)
class Outcome:
    """The one outcome of a test on all its ranks, which pytest's process reports.

    Attributes:
        kind: ``passed``, ``failed``, ``skipped`` or ``xfailed``.
        text: The text of a failure, or the reason of a skip or an xfail. A pass with a text is an
            unexpected one: a rank added a strict xfail mark to its item, and the item passed.
        hard: Whether a failure is more than an exception (a crash, a hang, a leak), so that no
            xfail mark excuses it.
        location: The path, the line (from 1) and the message where it failed or skipped; None if
            they are not known.
        sections: The output of the ranks, as ``("Captured stdout call (rank 0)", "...")``.
        properties: What the ranks recorded, as ``("loss (rank 1)", 0.5)``.
        assertion: Whether all ranks that are a cause of a failure failed by an assertion.
    """

    kind: str
    text: str = ""
    hard: bool = False
    location: tuple[str, int, str] | None = None
    sections: Sections = ()
    properties: Properties = ()
    assertion: bool = False

    def failure(self, text: str) -> RankFailure:
        """Return the exception for this failure."""
        if self.assertion and not self.hard:
            return RankAssertionFailure(text, hard=self.hard)
        return RankFailure(text, hard=self.hard)


#: Where an item has its outcome, once its ranks have run it.
OUTCOME: pytest.StashKey[Outcome] = pytest.StashKey()


def disagreement(warm: str, cold: str, text: str) -> str:
    """Return the text of the failure of a test or check whose second run had another outcome.

    The first run is on *warm* ranks, forked from a process that has imported torch; the second one
    under torchrun's command, whose ranks import everything themselves.

    Args:
        warm: The outcome on forked ranks, as ``passed``.
        cold: The outcome under the command ``torchrun``, as ``failed``.
        text: The text of the cold outcome, or that of the warm one if the cold one has none.
    """
    difference = f"{warm} on warm ranks, {cold} under torchrun"
    return f"warm ranks and torchrun's disagree: {difference}\n\n{text}".rstrip()


def finish_report(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Put the outcome of the ranks into the report of the item in pytest's process.

    Only the call runs on ranks: setup and teardown of the item do nothing here.
    """
    if report.when != "call":
        return
    outcome = item.stash.get(OUTCOME, None)
    if outcome is None:
        # The call raised before the ranks ran, or another plugin did not call the item's function.
        if report.passed:
            report.outcome, report.longrepr = "failed", NOT_RUN
        return
    # A pass with a text is a strict xpass. If the item has the xfail mark in this process too,
    # pytest has handled it.
    if (
        outcome.kind == "passed"
        and outcome.text
        and report.passed
        and not hasattr(report, "wasxfail")
    ):
        report.outcome, report.longrepr = "failed", outcome.text
    report.sections.extend(outcome.sections)
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, RankFailure):
        represent(report, str(error), outcome.location)
        # The ranks have applied their xfail marks to the exceptions themselves. ``wasxfail`` says
        # that pytest has applied the mark once more, to RankFailure, which does not count. A report
        # that another plugin turned into a pass, by running the test again, is left alone.
        if error.hard or hasattr(report, "wasxfail"):
            unexcused(report)
    elif outcome.kind == "skipped" and outcome.location is not None:
        # Where the test skipped, not the line of this plugin that called pytest.skip.
        report.longrepr = outcome.location


def unexcused(report: pytest.TestReport) -> None:
    """Make the report a failure in spite of an xfail mark.

    For a crash, a hang or a leak, which are never expected.
    """
    report.outcome = "failed"
    if hasattr(report, "wasxfail"):
        del report.wasxfail
