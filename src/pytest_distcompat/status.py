"""Verdicts, and their statuses: words, styles and weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

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
    """Outcome of one check in one cell; ``reason`` joins ``reasons``, those of each bug that makes it known."""

    check: str
    cell: str
    status: Status
    message: str = ""
    reason: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Tell whether it is a success; a known failure is none."""
        return self.status.ok
