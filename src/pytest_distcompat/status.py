"""Verdicts, and their statuses: words, styles and weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.registry import Registry

if TYPE_CHECKING:
    from typing_extensions import Self


class Status(str):
    """The status of one check in one cell.

    It is a text that equals its name in reports: ``Status.FIXED == "fixed?"``.

    An extension adds one by an entry point in the group ``pytest_distcompat.statuses``: of claims
    that hold in runs of its own kind, which show less than real ranks do (``trace.StandIn``).

    Attributes:
        name: The name in reports.
        word: The word in the matrix. Statuses that make a session red are in capitals, so that no
            colour is needed.
        style: ``good``, ``known``, ``bad`` or ``dim``.
        weight: Of two verdicts on a check in a cell the heavier one counts: red, then known, then
            any that ran.
        order: Its place among all statuses, in counts and lists.
        heading: The words before its reasons, where a report lists them; empty for a status whose
            reasons are not listed.
        reason: Of an extension's status: why a claim that holds has not passed.
    """

    __slots__ = ("heading", "name", "order", "reason", "style", "weight", "word")

    name: str
    word: str
    style: str
    weight: int
    order: int
    heading: str
    reason: str

    #: The claim holds.
    PASSED: ClassVar[Status]
    #: The driver refused the cell at build, as declared.
    REFUSED: ClassVar[Status]
    #: The check fails, as declared.
    KNOWN: ClassVar[Status]
    #: The cell was not run.
    SKIPPED: ClassVar[Status]
    #: The claim does not hold.
    FAILED: ClassVar[Status]
    #: The check is declared to fail, and does not.
    FIXED: ClassVar[Status]
    #: The driver refused the cell, but only after build.
    LATE: ClassVar[Status]
    CRASHED: ClassVar[Status]
    HUNG: ClassVar[Status]
    #: A run left processes, files or memory behind.
    LEAKED: ClassVar[Status]
    #: The item came to no verdict.
    ERROR: ClassVar[Status]

    def __new__(
        cls,
        name: str,
        word: str,
        style: str,
        weight: int,
        *,
        order: int,
        heading: str = "",
        reason: str = "",
    ) -> Self:
        """Make a text that equals the name."""
        status = super().__new__(cls, name)
        status.name = name
        status.word = word
        status.style = style
        status.weight = weight
        status.order = order
        status.heading = heading
        status.reason = reason
        return status

    def __reduce__(self) -> tuple[Any, ...]:
        """Have a copy be the same object."""
        return Status.from_name, (self.name,)

    @staticmethod
    def from_name(name: str) -> Status:
        """Return the status of that name; ``decode`` calls it.

        One that is not known here is of an extension that made a report and is not installed.
        """
        if name in _OWN:
            return _OWN[name]
        if name in ADDED_STATUSES.by_name:
            return ADDED_STATUSES.by_name[name]
        return _of_another_installation(name)

    @property
    def red(self) -> bool:
        """Tell whether it makes a session red."""
        return self.style == "bad"

    @property
    def ok(self) -> bool:
        """Tell whether it is a success; a known failure is none."""
        return self.style == "good"

    @property
    def conclusive(self) -> bool:
        """Tell whether it is of real ranks: they ran, and nothing stood in for them."""
        return self.weight > Status.SKIPPED.weight


Status.PASSED = Status("passed", "ok", "good", 2, order=10)
Status.REFUSED = Status("refused", "refused", "good", 2, order=20, heading="refused")
Status.KNOWN = Status("known", "known", "known", 3, order=30, heading="known")
# Those of extensions are listed here, from 31 to 39.
Status.SKIPPED = Status("skipped", "-", "dim", 1, order=40, heading="not run")
Status.FAILED = Status("failed", "FAIL", "bad", 4, order=50)
Status.FIXED = Status("fixed?", "FIXED?", "bad", 4, order=60)
Status.LATE = Status("late", "LATE", "bad", 4, order=70)
Status.CRASHED = Status("crashed", "CRASH", "bad", 4, order=80)
Status.HUNG = Status("hung", "HUNG", "bad", 4, order=90)
Status.LEAKED = Status("leaked", "LEAK", "bad", 4, order=100)
Status.ERROR = Status("error", "ERROR", "bad", 4, order=110)

_OWN: dict[str, Status] = {
    status.name: status for status in vars(Status).values() if isinstance(status, Status)
}
#: The statuses of extensions.
ADDED_STATUSES: Registry[Status] = Registry(
    "pytest_distcompat.statuses", Status, "status", has_modules=False
)


def all_statuses() -> list[Status]:
    """Return all statuses in their order, those of extensions too."""
    statuses = [*_OWN.values(), *ADDED_STATUSES.by_name.values()]
    return sorted(statuses, key=lambda status: status.order)


def explained_statuses() -> list[Status]:
    """Return the statuses whose reasons a report lists.

    Those that are no success come first, then the others.
    """
    explained = [status for status in all_statuses() if status.heading]
    return sorted(explained, key=lambda status: status.ok)


@functools.cache
def _of_another_installation(name: str) -> Status:
    return Status(name, name, "known", Status.SKIPPED.weight, order=39)


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
        ended_run: The run that ended early and whose ending is the message; empty for what the
            check itself found.
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
        for line in self.message.splitlines():
            if line.strip():
                return line.strip()
        return ""

    @property
    def why(self) -> str:
        """Return the reason; of a red verdict the first line of its message.

        A declared reason does not explain a red verdict.
        """
        return self.headline if self.red else self.reason or self.headline

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, as JSON and xdist have it; ``decode`` reads that."""
        return {**vars(self), "status": self.status.name, "reasons": list(self.reasons)}
