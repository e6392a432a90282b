"""Pairing of verdicts: which verdict of an earlier report belongs to which one of a later report.

``report.compare`` calls ``earlier_verdicts``. A *verdict* (passed, failed, ...) is about one
*check* in one *cell* of a suite, as the check ``names`` in the cell ``fsdp2-fp32-w2``. A suite is a
class, with a *place*: its node id, as ``tests/test_a.py::TestMyTrainer``. If the file is renamed,
the verdicts of the suite must still be paired, or all of them would count as missing and as new.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from pytest_distcompat.report.document import Report
from pytest_distcompat.status import Verdict


def earlier_verdicts(before: Report, after: Report) -> dict[int, Verdict]:
    """Return the earlier verdict for each later one, by the index of the later one in its report.

    A report may have several suites of one name, in different files, and a suite may have moved to
    another file since the earlier report. So verdicts are paired in three passes.
    """
    pairing = _Pairing(before, after)
    pairing.pair(_by_item)
    # The same suite, whatever the node ids of its items are.
    pairing.pair(_by_place)
    # A suite that moved to another file. Of several with its name, the first pairs with the first.
    pairing.keep_moved_suites()
    pairing.pair(_by_suite)
    return pairing.earlier


def _by_item(result: Verdict) -> Hashable:
    """Return a key by which a verdict pairs with that of the same item."""
    # Not by the driver: an item without a verdict may have none.
    return (result.nodeid, result.suite, result.cell, result.check)


def _by_place(result: Verdict) -> Hashable:
    """Return a key by which a verdict pairs with one of a suite of the same node id."""
    # The place is the node id of the suite: ``tests/test_a.py::TestMyTrainer``.
    return (result.place, result.suite, result.cell, result.check)


def _by_suite(result: Verdict) -> Hashable:
    """Return a key by which a verdict pairs with one of a suite of the same name."""
    # The suite is the name of its class, in whatever file.
    return (result.suite, result.cell, result.check)


@dataclass(frozen=True)
class _LaterVerdict:
    """A verdict of the later report, and its index there."""

    index: int
    verdict: Verdict


def _position(verdict: Verdict) -> tuple[str, str]:
    """Return what verdicts are sorted by, so that pairs do not depend on the order of the run."""
    return verdict.place, verdict.nodeid


class _Pairing:
    """Pairs of an earlier and a later verdict, found by one key after another.

    Attributes:
        earlier: The earlier verdict of each pair, by the index of the later one in its report.
    """

    def __init__(self, before: Report, after: Report) -> None:
        self._suites_before = _suites(before)
        self._suites_after = _suites(after)
        self._before = sorted(before.results, key=_position)
        self._after: list[_LaterVerdict] = []
        for index, verdict in enumerate(after.results):
            self._after.append(_LaterVerdict(index, verdict))
        self._after.sort(key=lambda later: _position(later.verdict))
        self.earlier: dict[int, Verdict] = {}

    def keep_moved_suites(self) -> None:
        """Leave out, in later passes, the suites that both reports have in the same place.

        Only a suite that is gone from its place can have moved to a new one.
        """
        moved_away: list[Verdict] = []
        for verdict in self._before:
            if verdict.place not in self._suites_after:
                moved_away.append(verdict)
        moved_here: list[_LaterVerdict] = []
        for later in self._after:
            if later.verdict.place not in self._suites_before:
                moved_here.append(later)
        self._before = moved_away
        self._after = moved_here

    def pair(self, key: Callable[[Verdict], Hashable]) -> None:
        """Pair the verdicts that have no partner yet and are equal in this key.

        Of several on either side the first is paired with the first.

        Args:
            key: Returns the key of a verdict.
        """
        paired_ids = {id(verdict) for verdict in self.earlier.values()}
        unpaired: defaultdict[Hashable, deque[Verdict]] = defaultdict(deque)
        for verdict in self._before:
            if id(verdict) not in paired_ids:
                unpaired[key(verdict)].append(verdict)
        for later in self._after:
            candidates = unpaired[key(later.verdict)]
            if later.index not in self.earlier and candidates:
                self.earlier[later.index] = candidates.popleft()


def _suites(report: Report) -> set[str]:
    """Return the node ids of the suites of all items, also of those that were not reached."""
    suites: set[str] = set()
    reached = [result.nodeid for result in report.results]
    for nodeid in (*report.unreached, *reached):
        suite, _, _ = nodeid.rpartition("::test")
        suites.add(suite)
    return suites
