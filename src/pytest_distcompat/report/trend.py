"""Trend: the verdicts of many nights in the order of time, what is broken and what is flaky.

``distcompat trend DIRECTORY`` reads the JSON reports of all *nights*, each the report of one
session, and calls ``trend``. It prints ``Trend.lines`` and writes the page that ``html.trend_html``
makes of the ``Trend``. A line of it::

    broken: red since 2026-11-24 23:57, not on 2026-11-23 23:57: torch 2.12.0 -> 2.13.0:
    fsdp2-fp32-w2:names (my_driver): FAIL: 3 parameters have other names

A report has a *verdict* (passed, failed, ...) for each *check* in each *cell*, such as the check
``names`` in ``fsdp2-fp32-w2`` (strategy, precision, 2 ranks), for each *driver*, the trainer that
was tested. It may also have a digest of the values that a training in the cell computed.

A ``History`` (``history``) has the verdicts on one check in one cell. Its fields ``before``,
``since``, ``until`` are numbers of nights, from 0: the last with a verdict before it was red, the
first red one, the first that was not red after it. ``changed`` and ``mended`` are the versions that
differ when it turned red and when it turned back: ``{"torch": ("2.12.0", "2.13.0")}``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.excerpt import visible
from pytest_distcompat.report.causes import constant_part, unshown
from pytest_distcompat.report.compare import BeforeAndNow, changed_values, differing
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.history import (
    History,
    Night,
    first_nights_with_equal_versions,
    history_of,
)
from pytest_distcompat.report.merge import merge
from pytest_distcompat.report.text import CAUSES, HEADLINE, cut, shortened
from pytest_distcompat.report.values import digest_of
from pytest_distcompat.status import Status, Verdict

#: A figure for each night, None where there is none.
_Figures = list[float | None]
#: A verdict for each night, None where there is none.
_Verdicts = list[Verdict | None]
#: For each night the seconds of a cell's items, and for each night its peak memory in bytes.
_Costs = tuple[_Figures, _Figures]

#: The values of ``History.kind``, in the order of the page. Histories of the last two kinds have no
#: row there.
KINDS = ("broken", "flaky", "fixed", "never red", "never run")


@dataclass(frozen=True)
class ValueTurn:
    """Cells whose trainings computed or saved something else in a night than before it.

    They are compared with the last night before it in which their values are known.

    Attributes:
        night: The number of the night, from 0.
        changed: What differs between the versions of both nights: package to (before, now).
        cells: The cells, each with its driver, as ``fsdp2-fp32-w2 (accelerate)``.
    """

    night: int
    changed: Mapping[str, BeforeAndNow]
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Trend:
    """Nights in the order of time, with the history of each check and the cost of each cell.

    Attributes:
        nights: The sessions, the earliest first.
        histories: A history for each check in each cell.
        costs: Cell to two lists with a figure for each night: the seconds of all its items, and the
            peak memory of the fullest rank in bytes; None in a night without a figure. The cell is
            written as ``a.py::TestMyTrainer[fsdp2-fp32-w2]``.
        value_turns: The nights in which trainings began to compute or save something else, whatever
            their verdicts.
    """

    nights: tuple[Night, ...]
    histories: tuple[History, ...]
    costs: Mapping[str, _Costs]
    value_turns: tuple[ValueTurn, ...] = ()

    @property
    def headline(self) -> str:
        """Return how many histories are of which kind: ``12 nights: 3 broken, 1 flaky``."""
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
        """Return since when it is broken and with which versions, or when it was fixed.

        Args:
            history: One that is broken, flaky or fixed.
        """
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
        """Yield the lines for a terminal, one for all verdicts with the same story and cause.

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
        """Return in one line since when cells have other values, and with which versions."""
        since = f"{self.nights[turn.night]}, {changes(turn.changed)}"
        cells = shortened(list(turn.cells))
        return f"other values since {since}: {cells}"

    def _last_verdicts_by_story(self) -> dict[_Story, list[Verdict]]:
        """Return the last red verdicts of broken, of flaky and of fixed histories, by story."""
        groups: dict[_Story, list[Verdict]] = {}
        # The first three kinds: those that were red in some night.
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
    """What those histories share that have one line together.

    Attributes:
        text: Since when they are broken, or when they were fixed: ``Trend.story``.
        cause: The message of their last red verdict, with ``#`` for each number.
    """

    text: str
    cause: str


def changes(changed: Mapping[str, BeforeAndNow]) -> str:
    """Return the changed versions as one text: ``torch 2.12.0 -> 2.13.0``."""
    if not changed:
        return "no version changed"
    return changed_values(changed)


@dataclass(frozen=True)
class _Session:
    """What the trend needs of one report.

    Attributes:
        night: The session, before it is compared with the others.
        results: Its verdicts: of several on a check in a cell, the worst.
        peak_memory: Suite and cell (``a.py::TestMyTrainer[ddp-fp32-w2]``) to the peak memory of the
            fullest rank in bytes.
        values: Cell and driver (``ddp-fp32-w2 (accelerate)``) to a digest of the values that the
            training computed.
    """

    night: Night
    results: list[Verdict]
    peak_memory: dict[str, int]
    values: dict[str, str]


@dataclass(frozen=True)
class _CheckKey:
    """A check in a cell of a suite, by the fields of ``Verdict``."""

    suite: str
    place: str
    cell: str
    check: str


def trend(reports: Iterable[Report]) -> Trend:
    """Return the trend of these reports: each is a night, and they may come in any order.

    Of several verdicts on the same check in the same cell in one night, the worst counts.
    """
    # Each report is reduced as it comes: a hundred whole ones may not fit in memory.
    sessions = [_reduced(report) for report in reports]
    sessions.sort(key=lambda session: session.night.began)
    nights = [session.night for session in sessions]
    # For each night the first one with the same versions: ``[0, 0, 2, 0]``.
    first_equal = first_nights_with_equal_versions(nights)
    histories = []
    for verdicts in _verdicts_by_check(sessions).values():
        histories.append(history_of(verdicts, nights, first_equal))
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
    # Another machine explains a change as another version does.
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

    That last night may be another one for some cells. They get a ``ValueTurn`` of their own,
    because other versions may have changed in between.
    """
    # Cell and driver to the last night that knows the values.
    last_night: dict[str, int] = {}
    for night, session in enumerate(sessions):
        # The night before, to the cells that turned since then.
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


def _verdicts_by_check(sessions: Sequence[_Session]) -> dict[_CheckKey, _Verdicts]:
    """Return for each check in each cell a list with one verdict, or None, for each night."""
    verdicts_by_check: dict[_CheckKey, _Verdicts] = {}
    for night, session in enumerate(sessions):
        for result in session.results:
            key = _CheckKey(result.suite, result.place, result.cell, result.check)
            verdicts = verdicts_by_check.setdefault(key, [None] * len(sessions))
            verdicts[night] = result
    return verdicts_by_check


def _costs_by_cell(sessions: Sequence[_Session]) -> dict[str, _Costs]:
    """Return ``Trend.costs``, for the cells that ran in any night."""
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
    """Return the costs of a cell that ran in none of so many nights."""
    seconds: _Figures = [None] * nights
    peaks: _Figures = [None] * nights
    return seconds, peaks


def _compared(nights: Sequence[Night], histories: Iterable[History]) -> Iterator[Night]:
    """Yield the nights with their counts of verdicts, and what changed since the night before.

    ``nights`` have neither yet.
    """
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
