"""Trend: the verdicts of many nights in the order of time, what is broken apart from what is flaky."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise

from pytest_distcompat.excerpt import visible
from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.causes import constant_part, unshown
from pytest_distcompat.report.compare import differing
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.merge import merge
from pytest_distcompat.report.text import CAUSES, HEADLINE, cut, shortened
from pytest_distcompat.status import Status, Verdict

#: Kinds of history, in the order of the page; those of the last two have no row of their own.
KINDS = ("broken", "flaky", "fixed", "never red", "never run")


@dataclass(frozen=True)
class Night:
    """One session: when it began, its seconds, and its versions with those of the machine.

    ``changed``: what differs from the night before. ``found`` and ``fixed``: verdicts that turned red, or ended being red, since
    their check last ran.
    """

    began: str
    seconds: float
    versions: Mapping[str, str]
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ran: int = 0
    red: int = 0
    found: int = 0
    fixed: int = 0

    def __str__(self) -> str:
        """Return the minute in which it began."""
        return self.began[:16].replace("T", " ")


@dataclass(frozen=True)
class History:
    """Verdicts on one check in one cell, one for each night; None where the report has none.

    A gap, also a skipped item, is neither red nor a fix.

    Attributes:
        last: The last red verdict; the last of all if none was red.
        kind: broken: red since ``since``; flaky: it turned and turned back with all versions equal.
        before: The last night with a verdict before ``since``, None if there is none.
        since: The first night of the last time it was red.
        until: The first night with a verdict that is not red after that, None if there is none.
        changed: What differs between the versions of ``before`` and ``since``.
        mended: What differs between the versions of the last night that was red and ``until``.
    """

    last: Verdict
    statuses: tuple[Status | None, ...]
    kind: str
    before: int | None = None
    since: int = 0
    until: int | None = None
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    mended: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def ran(self) -> list[tuple[int, Status]]:
        """Return the nights in which it came to a verdict, with that."""
        return [(at, one) for at, one in enumerate(self.statuses) if one and one is not Status.SKIPPED]

    @property
    def strip(self) -> list[tuple[Status | None, int, int]]:
        """Return each stretch of equal statuses, with its first and last night."""
        stretches = ((one, list(found)) for one, found in groupby(range(len(self.statuses)), self.statuses.__getitem__))
        return [(one, nights[0], nights[-1]) for one, nights in stretches]


@dataclass(frozen=True)
class Trend:
    """Nights in the order of time, a history for each check of each cell, and the cost of each cell.

    ``costs``: for each night the seconds of all items, and the peak memory of the fullest rank in bytes; None without a figure.
    """

    nights: tuple[Night, ...]
    histories: tuple[History, ...]
    costs: Mapping[str, tuple[list[float | None], list[float | None]]]

    @property
    def headline(self) -> str:
        """Return how many histories are of which kind."""
        kinds = Counter(history.kind for history in self.histories)
        gone = sum(bool(one.ran) and one.statuses[-1] in {None, Status.SKIPPED} for one in self.histories)
        counted = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
        nights = f"{len(self.nights)} night{'s' * (len(self.nights) != 1)}"
        return f"{nights}: {counted or 'no verdicts'}{f'; {gone} not run in the last' if gone else ''}"

    def story(self, history: History) -> str:
        """Return since when it is broken and with which versions, or when it was fixed."""
        if history.kind == "flaky":
            return "flaky: turned and turned back with equal versions"
        begun = f"red since {self.nights[history.since]}, " + (
            "its first verdict"
            if history.before is None
            else f"not on {self.nights[history.before]}: {changes(history.changed)}"
        )
        if history.until is not None:
            return f"fixed on {self.nights[history.until]}: {changes(history.mended)}; was {begun}"
        last = history.ran[-1][0]
        return f"broken: {begun}" + (f"; not run since {self.nights[last]}" if last < len(self.nights) - 1 else "")

    def lines(self) -> Iterator[str]:
        """Yield the lines for a terminal, one for each change of several verdicts; control characters are escaped."""
        yield self.headline
        listed = (one for kind in KINDS[:3] for one in self.histories if one.kind == kind)
        groups = grouped(((self.story(one), constant_part(one.last.why)), one.last) for one in listed)
        for (story, _), found in islice(groups.items(), CAUSES):
            names = shortened([f"{one.cell}:{one.check} ({one.driver})" for one in found])
            yield visible(f"{story}: {names}: {found[0].status.word}: {cut(found[0].why, HEADLINE)}")
        if len(groups) > CAUSES:
            yield unshown(len(groups) - CAUSES)


def changes(changed: Mapping[str, tuple[str, str]]) -> str:
    """Return the changed versions as one text."""
    return ", ".join(f"{name} {old} -> {now}" for name, (old, now) in changed.items()) or "no version changed"


def trend(reports: Iterable[Report]) -> Trend:
    """Return the trend of these reports, one of each night, in any order.

    Of several verdicts on the same check in the same cell in one night, the worst counts.
    """
    # Each report is reduced as it comes: a hundred whole ones may not fit in memory.
    sessions = sorted(map(_reduced, reports), key=lambda one: one[0].began)
    nights = [one for one, _, _ in sessions]
    verdicts: dict[tuple[str, ...], list[Verdict | None]] = {}
    costs: dict[str, tuple[list[float | None], list[float | None]]] = {}
    for at, (_, results, memory) in enumerate(sessions):
        for one in results:
            verdicts.setdefault((one.suite, one.place, one.cell, one.check), [None] * len(nights))[at] = one
            if one.status is not Status.SKIPPED:
                cell = f"{one.place}[{one.cell}]"
                seconds, peaks = costs.setdefault(cell, ([None] * len(nights), [None] * len(nights)))
                seconds[at], peaks[at] = (seconds[at] or 0.0) + one.seconds, memory.get(cell)
    all_versions = [night.versions for night in nights]
    # A history compares nights by the first one with equal versions.
    equal = [all_versions.index(one) for one in all_versions]
    histories = [_history(found, nights, equal) for found in verdicts.values()]
    return Trend(tuple(_counted(nights, histories)), tuple(histories), costs)


def _reduced(report: Report) -> tuple[Night, list[Verdict], dict[str, int]]:
    session = report.session
    machine = {name: session[name] for name in ("device", "gpu") if session.get(name)}
    night = Night(session.get("began", ""), session.get("seconds", 0.0), {**session.get("versions", {}), **machine})
    one = merge([report])
    return night, one.results, {f"{row.place}[{row.cell}]": max(row.memory) for row in one.rows if row.memory}


def _history(verdicts: Sequence[Verdict | None], nights: Sequence[Night], equal: Sequence[int]) -> History:
    statuses = tuple(one.status if one else None for one in verdicts)
    ran = [(at, one) for at, one in enumerate(verdicts) if one and one.status is not Status.SKIPPED]
    # Each stretch of verdicts that are all red, or all not.
    stretches = [list(found) for _, found in groupby(ran, key=lambda one: one[1].red)]
    position = next((at for at in reversed(range(len(stretches))) if stretches[at][0][1].red), None)
    if position is None:
        return History([one for one in verdicts if one][-1], statuses, "never red" if ran else "never run")
    (since, _), (red_until, last) = stretches[position][0], stretches[position][-1]
    before = stretches[position - 1][-1][0] if position else None
    until = stretches[position + 1][0][0] if stretches[position + 1 :] else None
    red: dict[int, bool] = {}
    turns: Counter[int] = Counter()
    for at, one in ran:
        turns[equal[at]] += red.get(equal[at], one.red) != one.red
        red[equal[at]] = one.red
    # One turn with equal versions may be a change of the user's own code, which a report does not know.
    if until is None and turns[equal[since]] < 2:
        kind = "broken"
    else:
        kind = "flaky" if max(turns.values()) > 1 else "fixed"
    changed = {} if before is None else differing(nights[before].versions, nights[since].versions)
    mended = {} if until is None else differing(nights[red_until].versions, nights[until].versions)
    return History(last, statuses, kind, before, since, until, changed, mended)


def _counted(nights: Sequence[Night], histories: Iterable[History]) -> Iterator[Night]:
    counts = [Counter[str]() for _ in nights]
    for history in histories:
        # The first night has none to differ from; a check that is new after it and red is found.
        for (_, was), (at, now) in pairwise([(0, Status.SKIPPED), *history.ran]):
            found, fixed = at > 0 and now.red and not was.red, was.red and not now.red
            counts[at].update(ran=1, red=int(now.red), found=int(found), fixed=int(fixed))
    for at, (night, count) in enumerate(zip(nights, counts, strict=True)):
        changed = differing(nights[at - 1].versions, night.versions) if at else {}
        yield Night(night.began, night.seconds, night.versions, changed, **count)
