"""History of one check in one cell over many nights: broken, flaky or fixed, and since when.

A *night* is one session of the tests, with the versions of all packages that were installed. In
each night a *check* in a *cell*, as ``names`` in ``fsdp2-fp32-w2``, has a *verdict*: passed,
failed, crashed and so on, some of which are red. ``report.trend`` collects the verdicts of all
nights and calls ``history_of`` for each check in each cell. The ``History`` that it returns becomes
a row of the page of ``distcompat trend``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_distcompat.report.compare import BeforeAndNow, differing
from pytest_distcompat.status import Status, Verdict


@dataclass(frozen=True)
class Night:
    """One session, and how its verdicts differ from those of earlier nights.

    Attributes:
        began: When it began, in UTC and ISO 8601, as ``2026-11-24T23:57:32Z``.
        seconds: How long it took.
        versions: Package to version, as ``{"torch": "2.13.0"}``; also ``device`` and ``gpu``.
        changed: The entries of ``versions`` that differ from the night before: name to (before,
            now).
        ran: How many checks in cells came to a verdict.
        red: How many of these verdicts are red.
        found: How many turned red since their check last ran.
        fixed: How many ended being red since their check last ran.
    """

    began: str
    seconds: float
    versions: Mapping[str, str]
    changed: Mapping[str, BeforeAndNow] = field(default_factory=dict)
    ran: int = 0
    red: int = 0
    found: int = 0
    fixed: int = 0

    def __str__(self) -> str:
        """Return the minute in which it began, as ``2026-11-24 23:57``."""
        return self.began[:16].replace("T", " ")


@dataclass(frozen=True)
class Strip:
    """Consecutive nights in which a check in a cell had the same status: a bar on the page.

    Attributes:
        status: The status; None if the check had no verdict.
        first_night: The number of the first of these nights, from 0.
        last_night: The number of the last.
    """

    status: Status | None
    first_night: int
    last_night: int


@dataclass(frozen=True)
class History:
    """The verdicts on one check in one cell in all nights.

    Nights are numbered from 0. A night without a verdict, or in which the item was skipped, is
    neither red nor a fix.

    Attributes:
        last: The last red verdict; the last of all if none was red.
        statuses: The status in each night; None where the report has no verdict.
        kind: ``broken`` (red since ``since``), ``flaky`` (it turned red and turned back while all
            versions stayed equal), ``fixed`` (it was red and is no longer), ``never red``, or
            ``never run``.
        before: The last night with a verdict before ``since``; None if there is none.
        since: The first night of the last time that it was red.
        until: The first night after that with a verdict that is not red; None if there is none.
        changed: What differs between the versions of ``before`` and ``since``: package to (before,
            now).
        mended: What differs between the versions of the last red night and ``until``.
    """

    last: Verdict
    statuses: tuple[Status | None, ...]
    kind: str
    before: int | None = None
    since: int = 0
    until: int | None = None
    changed: Mapping[str, BeforeAndNow] = field(default_factory=dict)
    mended: Mapping[str, BeforeAndNow] = field(default_factory=dict)

    @property
    def ran(self) -> list[tuple[int, Status]]:
        """Return the nights in which it came to a verdict, each as (night, status)."""
        nights: list[tuple[int, Status]] = []
        for night, status in enumerate(self.statuses):
            if status and status is not Status.SKIPPED:
                nights.append((night, status))
        return nights

    @property
    def strip(self) -> list[Strip]:
        """Return the statuses as bars, each with consecutive nights of the same status."""
        strips: list[Strip] = []
        for night, status in enumerate(self.statuses):
            if strips and strips[-1].status == status:
                strips[-1] = dataclasses.replace(strips[-1], last_night=night)
            else:
                strips.append(Strip(status, night, night))
        return strips


def first_nights_with_equal_versions(nights: Sequence[Night]) -> list[int]:
    """Return, for each night, the number of the first one with the same versions.

    ``[0, 0, 2, 0]``: the third night had other versions than all others. So two nights had the same
    versions if their numbers here are equal.
    """
    all_versions = [night.versions for night in nights]
    return [all_versions.index(versions) for versions in all_versions]


@dataclass
class _Stretch:
    """Consecutive verdicts that are all red, or all not red.

    Attributes:
        red: Whether they are red.
        first_night: The night of the first verdict.
        last_night: The night of the last verdict.
        last: The last verdict.
    """

    red: bool
    first_night: int
    last_night: int
    last: Verdict


def _stretches(verdicts: Sequence[Verdict | None]) -> list[_Stretch]:
    """Return the stretches of red and of other verdicts in turn.

    Nights without a verdict and skipped items do not end a stretch.
    """
    stretches: list[_Stretch] = []
    for night, verdict in enumerate(verdicts):
        if verdict is None or verdict.status is Status.SKIPPED:
            continue
        if stretches and stretches[-1].red == verdict.red:
            stretches[-1].last_night = night
            stretches[-1].last = verdict
        else:
            stretches.append(_Stretch(verdict.red, night, night, verdict))
    return stretches


def history_of(
    verdicts: Sequence[Verdict | None],
    nights: Sequence[Night],
    first_equal: Sequence[int],
) -> History:
    """Return the history of one check in one cell.

    It describes the last time that the check was red, and what changed when it turned red and back.

    Args:
        verdicts: Its verdict in each night, None where there is none; at least one is not None.
        nights: The nights.
        first_equal: The return value of ``first_nights_with_equal_versions``.
    """
    statuses = tuple(_status(verdict) for verdict in verdicts)
    stretches = _stretches(verdicts)
    position = _last_red_position(stretches)
    if position is None:
        # Without a stretch all verdicts are skips.
        kind = "never red" if stretches else "never run"
        return History(_last_verdict(verdicts), statuses, kind)
    last_red = stretches[position]
    # Red stretches and others alternate: the neighbours of a red one are not red.
    before = None
    changed: Mapping[str, BeforeAndNow] = {}
    if position > 0:
        before = stretches[position - 1].last_night
        versions_when_red = nights[last_red.first_night].versions
        changed = differing(nights[before].versions, versions_when_red)
    until = None
    mended: Mapping[str, BeforeAndNow] = {}
    if position + 1 < len(stretches):
        until = stretches[position + 1].first_night
        last_versions_when_red = nights[last_red.last_night].versions
        mended = differing(last_versions_when_red, nights[until].versions)
    turns = _turns_with_equal_versions(verdicts, first_equal)
    first_with_versions_when_red = first_equal[last_red.first_night]
    # One turn with equal versions may be a change of the user's own code, which a report does not
    # know. Two turns, there and back, are flaky.
    if until is None and turns[first_with_versions_when_red] < 2:
        kind = "broken"
    elif max(turns.values()) > 1:
        kind = "flaky"
    else:
        kind = "fixed"
    return History(
        last=last_red.last,
        statuses=statuses,
        kind=kind,
        before=before,
        since=last_red.first_night,
        until=until,
        changed=changed,
        mended=mended,
    )


def _status(verdict: Verdict | None) -> Status | None:
    """Return the status of a verdict; None if there is none."""
    if verdict is None:
        return None
    return verdict.status


def _last_verdict(verdicts: Sequence[Verdict | None]) -> Verdict:
    """Return the last verdict that is not None; there is at least one."""
    known = [verdict for verdict in verdicts if verdict]
    return known[-1]


def _last_red_position(stretches: Sequence[_Stretch]) -> int | None:
    """Return the index of the last red stretch, None if none is red."""
    last = None
    for position, stretch in enumerate(stretches):
        if stretch.red:
            last = position
    return last


def _turns_with_equal_versions(
    verdicts: Sequence[Verdict | None], first_equal: Sequence[int]
) -> Counter[int]:
    """Count how often a check turned red, or back, between nights with equal versions.

    Args:
        verdicts: The verdict of the check in each night.
        first_equal: The return value of ``first_nights_with_equal_versions``.

    Returns:
        The first night with some versions to the number of turns in all nights with these versions.
    """
    # The first night with some versions to whether the last verdict with them was red.
    red_before: dict[int, bool] = {}
    turns: Counter[int] = Counter()
    for night, verdict in enumerate(verdicts):
        if verdict is None or verdict.status is Status.SKIPPED:
            continue
        versions = first_equal[night]
        turned = versions in red_before and red_before[versions] != verdict.red
        turns[versions] += int(turned)
        red_before[versions] = verdict.red
    return turns
