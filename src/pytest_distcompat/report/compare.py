"""Comparison of two reports: verdicts that are newly broken, fixed or missing, and other differences."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_distcompat.excerpt import visible
from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.causes import cells_of, constant_part, wording
from pytest_distcompat.report.document import Report, counts
from pytest_distcompat.report.result import Change
from pytest_distcompat.status import Verdict

#: The statuses that are less than a verdict of real ranks.
WEAKER = frozenset({"skipped", "simulated"})
#: The settings that select cells.
SELECTING = ("strategies", "precisions", "drivers", "profile", "world_size", "nodes", "gpus", "budget", "shard")
#: The counts in the last line: a suite that stops running shows in the first three.
COUNTED = ("selected", "ran", "skipped", "unreached", "red", "known", "fixed?")


@dataclass
class Comparison:
    """Differences between two reports.

    ``broken``: red now and not before, or red in another way (a crash instead of a finding, or with a failed teardown);
    ``missing``: ran before and not now; ``new``: not selected before, and not red; ``otherwise``: still broken with another
    message, numbers aside.
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
        """Yield the lines for a terminal, the newly broken first; control characters are escaped."""
        return map(visible, self._lines())

    def _lines(self) -> Iterator[str]:
        news = (("newly broken", self.broken), ("newly missing", self.missing), ("newly fixed", self.fixed))
        yield ", ".join(
            f"{len(found)} {title}" for title, found in (*news, ("still broken", self.still), ("new", self.new))
        )
        for title, values in (("versions", self.versions), ("settings", self.settings)):
            if values:
                yield f"{title}: {', '.join(f'{name} {old} -> {now}' for name, (old, now) in values.items())}"
        yield ", ".join(
            f"{name} {old} -> {now}" if old != now else f"{name} {now}" for name, (old, now) in self.counts.items()
        )
        yield from _by_cause("newly broken", self.broken)
        cells = grouped(((change.cell, change.driver, change.why), change.check) for change in self.missing)
        for (cell, driver, why), checks in cells.items():
            yield f"newly missing: {cell} ({driver}): {', '.join(checks)}: {why}"
        yield from _by_cause("newly fixed", self.fixed)
        yield from _by_cause("still broken, otherwise", self.otherwise)

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the differences for the later report; ``name`` is the earlier report's file."""
        lists = {kind: [vars(change) for change in getattr(self, kind)] for kind in ("broken", "fixed", "missing")}
        return {"file": name, "text": list(self.lines()), **lists}


def _by_cause(title: str, changes: list[Change]) -> Iterator[str]:
    """Yield a line for each cause, with the verdicts beneath it if there are several."""
    causes = grouped((constant_part(change.what), change) for change in changes)
    for first, *others in causes.values():
        if not others:
            yield f"{title}: {first}"
            continue
        yield f"{title}: {len(others) + 1} verdicts: {first.what}"
        yield from (f"  {cell}: {', '.join(checks)}" for cell, checks in cells_of([first, *others]).items())


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports, verdict by verdict."""
    unreached = set(after.unreached)
    found = Comparison(
        versions=differing(before.session.get("versions", {}), after.session.get("versions", {})),
        settings=differing(_settings(before), _settings(after)),
    )
    earlier, later = counts(before), counts(after)
    found.counts = {name: (earlier[name], later[name]) for name in COUNTED}
    earlier_of = _earlier(before, after)
    for index, result in enumerate(after.results):
        was = earlier_of.get(index)
        change = _change(result, was.status if was else "", result.status, result.why)
        if result.red and result.teardown and not (was and was.teardown):
            why = f"{result.why}; and in its teardown: {result.teardown}"
            found.broken.append(dataclasses.replace(change, why=why))
        elif result.red and (was is None or was.status != result.status):
            found.broken.append(change)
        elif result.red and was is not None:
            found.still.append(change)
            # Names of temporary directories are no difference.
            if len({re.sub(r"\S*/\S*", "", wording(one)) for one in (was, result)}) > 1:
                found.otherwise.append(dataclasses.replace(change, why=f"{result.why}; it was: {was.why}"))
        elif was is None:
            found.new.append(change)
        elif result.status in WEAKER:
            if was.status not in WEAKER:
                found.missing.append(change)
        elif was.red or (was.status == "known" and result.status == "passed"):
            found.fixed.append(change)
    paired = {id(was) for was in earlier_of.values()}
    for was in before.results:
        if id(was) not in paired and was.status != "skipped":
            why = "not reached" if was.nodeid in unreached else "not selected"
            found.missing.append(_change(was, was.status, "", why))
    return found


def _change(result: Verdict, before: str, after: str, why: str) -> Change:
    return Change(result.suite, result.driver, result.cell, result.check, before, after, why)


def _earlier(before: Report, after: Report) -> dict[int, Verdict]:
    """Return the earlier verdict for each later one, by the index of the later one.

    Verdicts pair by node id, else by suite. A suite that moved is found by its name; of several of one name the first becomes
    the first.
    """
    suites_before, suites_after = (
        {nodeid.rpartition("::test")[0] for nodeid in (*one.unreached, *(result.nodeid for result in one.results))}
        for one in (before, after)
    )
    # Sorted, so that the pairs do not depend on the order of the run.
    old = sorted(before.results, key=lambda one: (one.place, one.nodeid))
    now = sorted(enumerate(after.results), key=lambda one: (one[1].place, one[1].nodeid))
    found: dict[int, Verdict] = {}

    def pair(key: Callable[[Verdict], object], moved: bool) -> None:
        taken = {id(was) for was in found.values()}
        unpaired: defaultdict[object, list[Verdict]] = defaultdict(list)
        for was in old:
            if id(was) not in taken and not (moved and was.place in suites_after):
                unpaired[key(was)].append(was)
        for index, result in now:
            if index not in found and not (moved and result.place in suites_before) and unpaired[key(result)]:
                found[index] = unpaired[key(result)].pop(0)

    # Not by the driver: an item without a verdict may have none.
    pair(lambda one: (one.nodeid, one.suite, one.cell, one.check), moved=False)
    pair(lambda one: (one.place, one.suite, one.cell, one.check), moved=False)
    pair(lambda one: (one.suite, one.cell, one.check), moved=True)
    return found


def _settings(report: Report) -> dict[str, str]:
    settings = report.session.get("settings", {})
    return {name: str(settings[name]["value"]) or "all" for name in SELECTING if name in settings}


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the names whose values differ, each with its value before and after."""
    names = dict.fromkeys((*before, *after))
    pairs = {name: (before.get(name, "none"), after.get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
