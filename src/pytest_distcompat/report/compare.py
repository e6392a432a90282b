"""Two reports side by side: what is newly broken, newly fixed, newly missing, and what else is different."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pytest_distcompat.excerpt import visible
from pytest_distcompat.report.causes import wording
from pytest_distcompat.report.document import Report, counts
from pytest_distcompat.report.result import WORDS, Result

#: The settings that say which cells are asked for.
SELECTING = ("strategies", "precisions", "drivers", "profile", "world_size", "device", "gpus")
#: What is counted in the last line: a suite that goes dark shows in the first three.
COUNTED = ("asked", "ran", "skipped", "unreached", "red", "known", "fixed?")


@dataclass(frozen=True)
class Change:
    """One verdict that is not what it was; ``before`` or ``after`` is empty where there was none."""

    suite: str
    driver: str
    cell: str
    check: str
    before: str
    after: str
    why: str = ""

    def __str__(self) -> str:
        """One line."""
        words = " -> ".join(WORDS.get(status, status) or "none" for status in (self.before, self.after))
        return f"{self.cell}:{self.check} ({self.driver}): {words}{f': {self.why}' if self.why else ''}"


@dataclass
class Comparison:
    """What is different. ``broken``: red now and not before, or not like this (a crash where there was a finding, a teardown that
    fails besides); ``missing``: ran before and not now; ``new``: was not asked for before, and is not red; ``otherwise``: of
    those still broken whose message is another, numbers aside.
    """

    broken: list[Change] = field(default_factory=list)
    fixed: list[Change] = field(default_factory=list)
    missing: list[Change] = field(default_factory=list)
    still: list[Change] = field(default_factory=list)
    otherwise: list[Change] = field(default_factory=list)
    new: list[Change] = field(default_factory=list)
    #: Package or setting to its value before and now.
    versions: dict[str, tuple[str, str]] = field(default_factory=dict)
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """For people: the news first. Names and messages are those of a file, so they are made fit for a terminal."""
        return map(visible, self._lines())

    def _lines(self) -> Iterator[str]:
        told = (("newly broken", self.broken), ("newly missing", self.missing), ("newly fixed", self.fixed))
        yield ", ".join(
            f"{len(found)} {title}" for title, found in (*told, ("still broken", self.still), ("new", self.new))
        )
        for title, values in (("versions", self.versions), ("settings", self.settings)):
            if values:
                yield f"{title}: {', '.join(f'{name} {old} -> {now}' for name, (old, now) in values.items())}"
        yield ", ".join(
            f"{name} {old} -> {now}" if old != now else f"{name} {now}" for name, (old, now) in self.counts.items()
        )
        yield from (f"newly broken: {change}" for change in self.broken)
        cells: dict[tuple[str, str, str], list[str]] = {}
        for change in self.missing:
            cells.setdefault((change.cell, change.driver, change.why), []).append(change.check)
        for (cell, driver, why), checks in cells.items():
            yield f"newly missing: {cell} ({driver}): {', '.join(checks)}: {why}"
        yield from (f"newly fixed: {change}" for change in self.fixed)
        yield from (f"still broken, otherwise: {change}" for change in self.otherwise)

    def to_json(self, name: str) -> dict[str, Any]:
        """For the report of the later run: ``name`` is the earlier one's file."""
        lists = {kind: [vars(change) for change in getattr(self, kind)] for kind in ("broken", "fixed", "missing")}
        return {"file": name, "text": list(self.lines()), **lists}


def compare(before: Report, after: Report) -> Comparison:
    """What became of each verdict."""
    dark = set(after.unreached)
    found = Comparison(
        versions=_differ(before.session.get("versions", {}), after.session.get("versions", {})),
        settings=_differ(_settings(before), _settings(after)),
    )
    earlier, later = counts(before), counts(after)
    found.counts = {name: (earlier[name], later[name]) for name in COUNTED}
    earlier_of = _earlier(before, after)
    for number, result in enumerate(after.results):
        was = earlier_of.get(number)
        change = _change(result, was.status if was else "", result.status, result.why)
        if result.red:
            _broken(found, was, result, change)
        elif was is None:
            found.new.append(change)
        elif result.status == "skipped":
            if was.status != "skipped":
                found.missing.append(change)
        elif was.red or (was.status == "known" and result.status == "passed"):
            found.fixed.append(change)
    there = {id(was) for was in earlier_of.values()}
    for was in before.results:
        if id(was) not in there and was.status != "skipped":
            why = "not reached" if was.nodeid in dark else "not asked for"
            found.missing.append(_change(was, was.status, "", why))
    return found


def _broken(found: Comparison, was: Result | None, now: Result, change: Change) -> None:
    if now.teardown and not (was and was.teardown):
        found.broken.append(dataclasses.replace(change, why=f"{now.why}; and in its teardown: {now.teardown}"))
    elif was is None or was.status != now.status:
        found.broken.append(change)
    else:
        found.still.append(change)
        if not _alike(was, now):
            found.otherwise.append(dataclasses.replace(change, why=f"{now.why}; it was: {was.why}"))


def _alike(was: Result, now: Result) -> bool:
    """Whether they say the same, names of temporary directories aside."""
    one, other = (re.sub(r"\S*/\S*", "", wording(result)) for result in (was, now))
    return one == other


def _change(of: Result, before: str, after: str, why: str) -> Change:
    return Change(of.suite, of.driver, of.cell, of.check, before, after, why)


def _earlier(before: Report, after: Report) -> dict[int, Result]:
    """From the number of a verdict to what it was: of the same item, else of the same suite.

    A suite that is elsewhere now is known by its name; of several such, the first place becomes the first.
    """
    here = {nodeid.rpartition("::test")[0] for nodeid in after.unreached} | {one.place for one in after.results}
    there = {nodeid.rpartition("::test")[0] for nodeid in before.unreached} | {one.place for one in before.results}
    # Sorted, for which of several is the first must not depend on the order of the run.
    old = sorted(before.results, key=lambda one: (one.place, one.nodeid))
    now = sorted(enumerate(after.results), key=lambda one: (one[1].place, one[1].nodeid))
    found: dict[int, Result] = {}

    def pair(name: Callable[[Result], object], moved: bool) -> None:
        taken = {id(was) for was in found.values()}
        waiting: defaultdict[object, list[Result]] = defaultdict(list)
        for was in old:
            if id(was) not in taken and not (moved and was.place in here):
                waiting[name(was)].append(was)
        for number, result in now:
            if number not in found and not (moved and result.place in there) and waiting[name(result)]:
                found[number] = waiting[name(result)].pop(0)

    # Not by the driver: an item that came to no verdict may have none.
    pair(lambda one: (one.nodeid, one.suite, one.cell, one.check), moved=False)
    pair(lambda one: (one.place, one.suite, one.cell, one.check), moved=False)
    pair(lambda one: (one.suite, one.cell, one.check), moved=True)
    return found


def _settings(report: Report) -> dict[str, str]:
    settings = report.session.get("settings", {})
    return {name: str(settings[name]["value"]) or "all" for name in SELECTING if name in settings}


def _differ(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys((*before, *after))
    pairs = {name: (before.get(name, "none"), after.get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
