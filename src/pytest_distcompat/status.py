"""``Verdict``, the outcome of one check in one cell, and ``Status``, what it may be.

``judge.judge`` returns a ``Verdict``: check ``resume`` in cell ``fsdp2-bf16_upcast-w2`` has status
``failed`` with a message. (A cell is one point of the test matrix.) ``plugin.suite.run`` adds the
rest, such as the node id. The verdict goes as JSON from pytest-xdist's workers to the main process,
and into reports.

A status has a word for the matrix in the terminal (``ok``, ``FAIL``), a style that says whether it
makes the session red, and an order for lists. Extensions add statuses by entry points.
"""

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

    An extension adds one by an entry point in the group ``pytest_distcompat.statuses``. Its runs
    have a stand-in in place of real ranks (``trace.StandIn``). A claim that holds there gets this
    status and not ``passed``, since a stand-in shows less than ranks do.

    Attributes:
        name: The name in reports.
        word: The word in the matrix. Statuses that make a session red are in capitals, so that no
            colour is needed.
        style: ``good``, ``known``, ``bad`` (the session is red) or ``dim``.
        weight: If there are two verdicts on a check in a cell, the one of more weight counts. Red
            ones have most, then known ones, then others of runs; those that were not run have
            least.
        order: Its place among all statuses, in counts and lists.
        heading: The words before the list of reasons in a report: ``known``. Empty for a status
            whose reasons are not listed.
        reason: Of an extension's status, why a claim that holds has not passed; else empty.
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
        """Return a new status, a text that equals the name."""
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
        """Make copies and pickles of a status the same object, so that ``is`` works."""
        return Status.from_name, (self.name,)

    @staticmethod
    def from_name(name: str) -> Status:
        """Return the status of that name; ``decode`` calls it to read JSON.

        An unknown name is that of an extension that made a report, and that is not installed here.
        It gets a status that is neither a success nor red.
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
        """Tell whether it is a success. A known failure is not."""
        return self.style == "good"

    @property
    def conclusive(self) -> bool:
        """Tell whether real ranks ran. They did not if the cell was skipped or had a stand-in."""
        return self.weight > Status.SKIPPED.weight


Status.PASSED = Status("passed", "ok", "good", 2, order=10)
Status.REFUSED = Status("refused", "refused", "good", 2, order=20, heading="refused")
Status.KNOWN = Status("known", "known", "known", 3, order=30, heading="known")
# Statuses of extensions have an order from 31 to 39.
Status.SKIPPED = Status("skipped", "-", "dim", 1, order=40, heading="not run")
Status.FAILED = Status("failed", "FAIL", "bad", 4, order=50)
Status.FIXED = Status("fixed?", "FIXED?", "bad", 4, order=60)
Status.LATE = Status("late", "LATE", "bad", 4, order=70)
Status.CRASHED = Status("crashed", "CRASH", "bad", 4, order=80)
Status.HUNG = Status("hung", "HUNG", "bad", 4, order=90)
Status.LEAKED = Status("leaked", "LEAK", "bad", 4, order=100)
Status.ERROR = Status("error", "ERROR", "bad", 4, order=110)

#: Name -> status, without those of extensions.
_OWN: dict[str, Status] = {
    status.name: status for status in vars(Status).values() if isinstance(status, Status)
}
#: The statuses of extensions.
ADDED_STATUSES: Registry[Status] = Registry(
    "pytest_distcompat.statuses", Status, "status", has_modules=False
)


def all_statuses() -> list[Status]:
    """Return all statuses by ascending order, with those of extensions."""
    statuses = [*_OWN.values(), *ADDED_STATUSES.by_name.values()]
    return sorted(statuses, key=lambda status: status.order)


def explained_statuses() -> list[Status]:
    """Return the statuses whose reasons a report lists; ``refused``, a success, comes last."""
    explained = [status for status in all_statuses() if status.heading]
    return sorted(explained, key=lambda status: status.ok)


@functools.cache
def _of_another_installation(name: str) -> Status:
    """Return a status for an unknown name; always the same object for a name."""
    return Status(name, name, "known", Status.SKIPPED.weight, order=39)


@dataclass(frozen=True)
class Verdict:
    """Outcome of one check in one cell.

    The judge fills in the first fields. The item of a suite adds the others, from ``suite`` on.

    Attributes:
        check: The name of the check: ``resume``.
        cell: The id of the cell: ``fsdp2-bf16_upcast-w2``.
        status: The status.
        message: What is wrong: the findings, one a line, or the failure of a run.
        reason: Why it is known, refused or skipped. If several bugs are known, their reasons,
            joined.
        reasons: The reason of each known bug.
        suite: The name of the suite's class: ``TestMyTrainer``.
        driver: The name of the suite's driver, the class by which a trainer is tested.
        nodeid: pytest's node id of the item.
        seconds: The duration of the item, with the runs that it was the first to need.
        began: When the item began, in seconds since the session began.
        device_seconds: How long its runs had devices, in seconds, summed over the devices.
        rank: The rank that failed first, or that the finding names.
        reproduce: The command that runs the item alone, empty for an item that came to no verdict.
        teardown: The error of the item's teardown, if that failed too.
        ended_run: The name of the run whose failure is the message; empty if the message is of
            the check's own findings.
        seed: The seed by which an extension drew the runs at random; None if it did not.
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
        """Tell whether it is a success. A known failure is not."""
        return self.status.ok

    @property
    def red(self) -> bool:
        """Tell whether it makes the session red."""
        return self.status.red

    @property
    def place(self) -> str:
        """Return the node id of the suite, which differs for classes of one name in two modules.

        It is ``test_a.py::TestMyTrainer`` of ``test_a.py::TestMyTrainer::test[CELL:CHECK]``.
        """
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
        """Return one line that explains the verdict.

        It is the first line of the message of a red verdict, which a declared reason does not
        explain. Of others it is the reason, if there is one.
        """
        if self.red:
            return self.headline
        return self.reason or self.headline

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data for JSON, which ``decode`` turns into a verdict again."""
        return {**vars(self), "status": self.status.name, "reasons": list(self.reasons)}
