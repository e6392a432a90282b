"""Trend: the verdicts of many nights in the order of time.

What is broken is told from what is flaky.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_distcompat.excerpt import visible
from pytest_distcompat.report.causes import constant_part, unshown
from pytest_distcompat.report.compare import BeforeAndNow, changed_values, differing
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.merge import merge
from pytest_distcompat.report.text import CAUSES, HEADLINE, cut, shortened
from pytest_distcompat.report.values import digest_of
from pytest_distcompat.status import Status, Verdict

#: A figure for each night, None where there is none.
_Figures = list[float | None]
#: A verdict for each night, None where there is none.
_Verdicts = list[Verdict | None]
#: The seconds of a cell's items, and its peak memory in bytes.
_Costs = tuple[_Figures, _Figures]

#: Kinds of history, in the order of the page; those of the last two have no row of their own.
KINDS = ("broken", "flaky", "fixed", "never red", "never run")


@dataclass(frozen=True)
class Night:
    """One session: when it began, its seconds, and its versions with those of the machine.

    Attributes:
        began: When it began, in ISO 8601.
        seconds: How long it took.
        versions: The versions of packages, and what is known of the machine.
        changed: What of these differs from the night before.
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
        """Return the minute in which it began."""
        return self.began[:16].replace("T", " ")


@dataclass(frozen=True)
class Strip:
    """Consecutive nights in which a check in a cell had the same status.

    Attributes:
        status: The status; None if the check had no verdict.
        first_night: The number of the first of these nights.
        last_night: The number of the last.
    """

    status: Status | None
    first_night: int
    last_night: int


@dataclass(frozen=True)
class History:
    """Verdicts on one check in one cell, one for each night; None where the report has none.

    A gap, also a skipped item, is neither red nor a fix.

    Attributes:
        last: The last red verdict; the last of all if none was red.
        statuses: The status in each night.
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
    changed: Mapping[str, BeforeAndNow] = field(default_factory=dict)
    mended: Mapping[str, BeforeAndNow] = field(default_factory=dict)

    @property
    def ran(self) -> list[tuple[int, Status]]:
        """Return the nights in which it came to a verdict, with that."""
        nights: list[tuple[int, Status]] = []
        for night, status in enumerate(self.statuses):
            if status and status is not Status.SKIPPED:
                nights.append((night, status))
        return nights

    @property
    def strip(self) -> list[Strip]:
        """Return the stretches of equal statuses."""
        strips: list[Strip] = []
        for night, status in enumerate(self.statuses):
            if strips and strips[-1].status == status:
                strips[-1] = dataclasses.replace(strips[-1], last_night=night)
            else:
                strips.append(Strip(status, night, night))
        return strips


@dataclass(frozen=True)
class ValueTurn:
    """Cells whose trainings computed or saved something else in a night than before it.

    They are compared with the last night before it in which their values are known.

    Attributes:
        night: The night.
        changed: What differs between the versions of both nights.
        cells: The cells, each with its driver.
    """

    night: int
    changed: Mapping[str, BeforeAndNow]
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Trend:
    """Nights in the order of time, with the history of each check and the cost of each cell.

    Attributes:
        nights: The sessions.
        histories: The verdicts on each check of each cell.
        costs: By cell, for each night the seconds of all items, and the peak memory of the fullest
            rank in bytes; None without a figure.
        value_turns: The nights in which trainings began to compute or save something else, whatever
            their verdicts.
    """

    nights: tuple[Night, ...]
    histories: tuple[History, ...]
    costs: Mapping[str, _Costs]
    value_turns: tuple[ValueTurn, ...] = ()

    @property
    def headline(self) -> str:
        """Return how many histories are of which kind."""
        histories_by_kind = Counter(history.kind for history in self.histories)
        counts = []
        for kind in KINDS:
            if histories_by_kind[kind]:
                counts.append(f"{histories_by_kind[kind]} {kind}")
        kinds = ", ".join(counts) or "no verdicts"
        plural = "s" if len(self.nights) != 1 else ""
        text = f"{len(self.nights)} night{plural}: {kinds}"
        stopped = self._stopped_running()
        if stopped:
            text += f"; {stopped} not run in the last"
        return text

    def _stopped_running(self) -> int:
        """Count the checks in cells that once came to a verdict, and did not in the last night."""
        count = 0
        for history in self.histories:
            if history.ran and history.statuses[-1] in {None, Status.SKIPPED}:
                count += 1
        return count

    def story(self, history: History) -> str:
        """Return since when it is broken and with which versions, or when it was fixed."""
        if history.kind == "flaky":
            return "flaky: turned and turned back with equal versions"
        cause = "its first verdict"
        if history.before is not None:
            night_before = self.nights[history.before]
            cause = f"not on {night_before}: {changes(history.changed)}"
        begun = f"red since {self.nights[history.since]}, {cause}"
        if history.until is not None:
            night_fixed = self.nights[history.until]
            return f"fixed on {night_fixed}: {changes(history.mended)}; was {begun}"
        last_night, _ = history.ran[-1]
        if last_night < len(self.nights) - 1:
            return f"broken: {begun}; not run since {self.nights[last_night]}"
        return f"broken: {begun}"

    def lines(self) -> Iterator[str]:
        """Yield the lines for a terminal, one for all verdicts that changed alike.

        Control characters are escaped.
        """
        yield self.headline
        groups = self._last_verdicts_by_story()
        for story, verdicts in list(groups.items())[:CAUSES]:
            first = verdicts[0]
            names = shortened([_name(verdict) for verdict in verdicts])
            why = cut(first.why, HEADLINE)
            outcome = f"{first.status.word}: {why}"
            yield visible(f"{story.text}: {names}: {outcome}")
        if len(groups) > CAUSES:
            yield unshown(len(groups) - CAUSES)
        for turn in self.value_turns:
            yield visible(self.turn_text(turn))

    def turn_text(self, turn: ValueTurn) -> str:
        """Return since when cells have other values, and with which versions."""
        since = f"{self.nights[turn.night]}, {changes(turn.changed)}"
        cells = shortened(list(turn.cells))
        return f"other values since {since}: {cells}"

    def _last_verdicts_by_story(self) -> dict[_Story, list[Verdict]]:
        """Return the last red verdicts of broken, of flaky and of fixed histories, by story."""
        groups: dict[_Story, list[Verdict]] = {}
        for kind in KINDS[:3]:
            for history in self.histories:
                if history.kind != kind:
                    continue
                cause = constant_part(history.last.why)
                story = _Story(self.story(history), cause)
                groups.setdefault(story, []).append(history.last)
        return groups


def _name(verdict: Verdict) -> str:
    return f"{verdict.cell}:{verdict.check} ({verdict.driver})"


@dataclass(frozen=True)
class _Story:
    """What histories share that are listed as one.

    Attributes:
        text: Since when they are broken, or when they were fixed.
        cause: The message of their last red verdict, numbers aside.
    """

    text: str
    cause: str


def changes(changed: Mapping[str, BeforeAndNow]) -> str:
    """Return the changed versions as one text."""
    if not changed:
        return "no version changed"
    return changed_values(changed)


@dataclass(frozen=True)
class _Session:
    """What the trend needs of one report.

    Attributes:
        night: The session, before it is compared with the others.
        results: Its verdicts: of several on a check in a cell, the worst.
        peak_memory: The peak memory of the fullest rank in bytes, by suite and cell.
        values: A digest of the values of each training, by cell and driver.
    """

    night: Night
    results: list[Verdict]
    peak_memory: dict[str, int]
    values: dict[str, str]


@dataclass(frozen=True)
class _CheckKey:
    """A check in a cell of a suite, as its verdicts have them."""

    suite: str
    place: str
    cell: str
    check: str


def trend(reports: Iterable[Report]) -> Trend:
    """Return the trend of these reports, one of each night, in any order.

    Of several verdicts on the same check in the same cell in one night, the worst counts.
    """
    # Each report is reduced as it comes: a hundred whole ones may not fit in memory.
    sessions = [_reduced(report) for report in reports]
    sessions.sort(key=lambda session: session.night.began)
    nights = [session.night for session in sessions]
    first_equal = _first_nights_with_equal_versions(nights)
    histories = []
    for verdicts in _verdicts_by_check(sessions).values():
        histories.append(_history(verdicts, nights, first_equal))
    return Trend(
        nights=tuple(_compared(nights, histories)),
        histories=tuple(histories),
        costs=_costs_by_cell(sessions),
        value_turns=tuple(_value_turns(sessions)),
    )


def _reduced(report: Report) -> _Session:
    """Return what the trend needs of a report."""
    session = report.session
    versions = dict(session.get("versions", {}))
    for name in ("device", "gpu"):
        if session.get(name):
            versions[name] = session[name]
    began = session.get("began", "")
    night = Night(began, session.get("seconds", 0.0), versions)
    # A merge of one report keeps the worst verdict on a check in a cell.
    merged = merge([report])
    peak_memory = {}
    values = {}
    for row in merged.rows:
        if row.memory:
            suite_and_cell = f"{row.place}[{row.cell}]"
            peak_memory[suite_and_cell] = max(row.memory)
        if row.values:
            cell_and_driver = f"{row.cell} ({row.driver})"
            values[cell_and_driver] = digest_of(row.values)
    return _Session(night, merged.results, peak_memory, values)


def _value_turns(sessions: Sequence[_Session]) -> Iterator[ValueTurn]:
    """Yield each night in which cells have other values than in the last night that knows theirs.

    Cells whose earlier nights differ are turns of their own, since other versions may have changed
    in between.
    """
    last_night: dict[str, int] = {}
    for night, session in enumerate(sessions):
        # The cells that turned, by the night before it that knows their values.
        turned: dict[int, list[str]] = {}
        for cell, digest in session.values.items():
            before = last_night.get(cell)
            if before is not None and sessions[before].values[cell] != digest:
                turned.setdefault(before, []).append(cell)
            last_night[cell] = night
        for before, cells in turned.items():
            versions_before = sessions[before].night.versions
            changed = differing(versions_before, session.night.versions)
            yield ValueTurn(night, changed, tuple(cells))


def _first_nights_with_equal_versions(nights: Sequence[Night]) -> list[int]:
    """Return, for each night, the first one with the same versions.

    So two nights have the same versions if their numbers here are equal.
    """
    all_versions = [night.versions for night in nights]
    return [all_versions.index(versions) for versions in all_versions]


def _verdicts_by_check(sessions: Sequence[_Session]) -> dict[_CheckKey, _Verdicts]:
    """Return one verdict or None for each night, by check and cell."""
    verdicts_by_check: dict[_CheckKey, _Verdicts] = {}
    for night, session in enumerate(sessions):
        for result in session.results:
            key = _CheckKey(result.suite, result.place, result.cell, result.check)
            verdicts = verdicts_by_check.setdefault(key, [None] * len(sessions))
            verdicts[night] = result
    return verdicts_by_check


def _costs_by_cell(sessions: Sequence[_Session]) -> dict[str, _Costs]:
    """Return the seconds and the peak memory of each night by cell, for cells that ran."""
    costs: dict[str, _Costs] = {}
    for night, session in enumerate(sessions):
        for result in session.results:
            if result.status is Status.SKIPPED:
                continue
            cell = f"{result.place}[{result.cell}]"
            seconds, peaks = costs.setdefault(cell, _no_costs(len(sessions)))
            seconds[night] = (seconds[night] or 0.0) + result.seconds
            peaks[night] = session.peak_memory.get(cell)
    return costs


def _no_costs(nights: int) -> _Costs:
    seconds: _Figures = [None] * nights
    peaks: _Figures = [None] * nights
    return seconds, peaks


@dataclass
class _Stretch:
    """Consecutive verdicts that are all red, or all not.

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


def _history(
    verdicts: Sequence[Verdict | None],
    nights: Sequence[Night],
    first_equal: Sequence[int],
) -> History:
    """Return the history of one check in one cell.

    It has the last time that the check was red, and the nights between which it turned.

    Args:
        verdicts: Its verdict in each night, None where there is none.
        nights: The nights.
        first_equal: For each night, the first one with equal versions.
    """
    statuses = tuple(_status(verdict) for verdict in verdicts)
    stretches = _stretches(verdicts)
    position = _last_red_position(stretches)
    if position is None:
        kind = "never red" if stretches else "never run"
        return History(_last_verdict(verdicts), statuses, kind)
    last_red = stretches[position]
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
    # know.
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
    if verdict is None:
        return None
    return verdict.status


def _last_verdict(verdicts: Sequence[Verdict | None]) -> Verdict:
    """Return the last verdict of which there is at least one."""
    known = [verdict for verdict in verdicts if verdict]
    return known[-1]


def _last_red_position(stretches: Sequence[_Stretch]) -> int | None:
    """Return the position of the last red stretch, None if none is red."""
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
        first_equal: For each night, the first one with equal versions. The counts are by it.
    """
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


def _compared(nights: Sequence[Night], histories: Iterable[History]) -> Iterator[Night]:
    """Yield the nights with their counts of verdicts, and what changed since the night before."""
    counts = [Counter[str]() for _ in nights]
    for history in histories:
        # The first night has none to differ from; a check that is new after it and red counts as
        # newly red.
        red_before = False
        for number, status in history.ran:
            counts[number]["ran"] += 1
            counts[number]["red"] += int(status.red)
            turned_red = number > 0 and status.red and not red_before
            turned_back = red_before and not status.red
            counts[number]["found"] += int(turned_red)
            counts[number]["fixed"] += int(turned_back)
            red_before = status.red
    for number, night in enumerate(nights):
        changed = {}
        if number > 0:
            night_before = nights[number - 1]
            changed = differing(night_before.versions, night.versions)
        count = counts[number]
        yield dataclasses.replace(
            night,
            changed=changed,
            ran=count["ran"],
            red=count["red"],
            found=count["found"],
            fixed=count["fixed"],
        )
