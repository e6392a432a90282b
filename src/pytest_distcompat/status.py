"""Verdicts, and their statuses: words, styles and weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class Status(str, Enum):
    """Status of one check in one cell. It equals its name in reports: ``Status.FIXED == "fixed?"``.

    Attributes:
        word: The word in the matrix. Statuses that make a session red are in capitals, so that no colour is needed.
        style: ``good``, ``known``, ``bad`` or ``dim``.
        weight: Of two verdicts on a check in a cell the heavier one counts: red, then known, then any that ran.

    """

    word: str
    style: str
    weight: int

    #: The claim holds.
    PASSED = "passed", "ok", "good", 2
    #: The driver refused the cell at build, as declared.
    REFUSED = "refused", "refused", "good", 2
    #: The check fails, as declared.
    KNOWN = "known", "known", "known", 3
    #: The claim holds in a simulation, which computes no values: weaker than ``passed``.
    SIMULATED = "simulated", "simulated", "known", 1
    #: The cell was not run.
    SKIPPED = "skipped", "-", "dim", 1
    #: The claim does not hold.
    FAILED = "failed", "FAIL", "bad", 4
    #: The check is declared to fail, and does not.
    FIXED = "fixed?", "FIXED?", "bad", 4
    #: The driver refused the cell, but only after build.
    LATE = "late", "LATE", "bad", 4
    CRASHED = "crashed", "CRASH", "bad", 4
    HUNG = "hung", "HUNG", "bad", 4
    #: A run left processes, files or memory behind.
    LEAKED = "leaked", "LEAK", "bad", 4
    #: The item came to no verdict.
    ERROR = "error", "ERROR", "bad", 4

    def __new__(cls, value: str, word: str = "", style: str = "", weight: int = 0) -> Self:
        """Make a member that is equal to its value. ``Status(value)``, which finds one, takes no more arguments."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.word, member.style, member.weight = word, style, weight
        return member

    __str__ = str.__str__

    @property
    def red(self) -> bool:
        """Tell whether it makes a session red."""
        return self.style == "bad"

    @property
    def ok(self) -> bool:
        """Tell whether it is a success; a known failure is none."""
        return self.style == "good"


@dataclass(frozen=True)
class Verdict:
    """Outcome of one check in one cell, from the judge to the report, which has it as JSON.

    A suite fills in the rest, from ``suite`` on.

    Attributes:
        reason: Why it is known, refused or skipped: ``reasons``, one of each bug, joined.
        seconds: The duration of the item, with the runs that it was the first to need.
        began: When the item began, in seconds since the session began.
        device_seconds: The seconds of all devices that its runs had.
        rank: The rank that failed first, or that the finding names.
        reproduce: The command that runs the item alone, empty for an item that came to no verdict.
        teardown: The error of the item's teardown, if that failed too.
        ended_run: The run that ended early and whose ending is the message; empty for what the check itself found.
        seed: What the runs were drawn by; None if they were not drawn.
    """

    check: str
    cell: str
    status: Status
    message: str = ""
    reason: str = ""
    reasons: tuple[str, ...] = ()
    suite: str = ""
    driver: str = ""
    nodeid: str = ""
    seconds: float = 0.0
    began: float = 0.0
    device_seconds: float = 0.0
    rank: int | None = None
    reproduce: str = ""
    teardown: str = ""
    ended_run: str = ""
    seed: int | None = None

    @property
    def ok(self) -> bool:
        """Tell whether it is a success; a known failure is none."""
        return self.status.ok

    @property
    def red(self) -> bool:
        """Tell whether it makes the session red."""
        return self.status.red

    @property
    def place(self) -> str:
        """Return the suite's node id: classes of one name in two modules are two suites."""
        return self.nodeid.rpartition("::test")[0]

    @property
    def headline(self) -> str:
        """Return the first line of the message that is not empty."""
        return next((line.strip() for line in self.message.splitlines() if line.strip()), "")

    @property
    def why(self) -> str:
        """Return the reason; of a red verdict the first line of the message, since a declared reason does not explain it."""
        return self.headline if self.red else self.reason or self.headline

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, as JSON and xdist have it; ``decode`` reads that."""
        return {**vars(self), "status": self.status.value, "reasons": list(self.reasons)}
