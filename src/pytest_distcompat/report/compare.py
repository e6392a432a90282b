"""Comparison of two reports: the verdicts that are newly broken, fixed or missing, and more.

``compare(before, after)`` is called at the end of a session with ``--distcompat-baseline`` and by
the command ``distcompat diff``. Both reports have *verdicts* (passed, failed, known, ...), each of
one *check* in one *cell* of one suite, such as the check ``names`` in ``fsdp2-fp32-w2`` (strategy,
precision, 2 ranks) of ``TestMyTrainer``. The ``Comparison`` that it returns has text lines for the
terminal and JSON for the report, as::

    1 newly broken, 0 newly missing, 2 newly fixed, 0 still broken, 0 new
    versions: torch 2.12.0 -> 2.13.0
    newly broken: fsdp2-fp32-w2:names (my_driver): ok -> FAIL: 3 parameters have other names

A *driver* is the trainer that a suite tests. *Red* are the statuses that make a session fail. A
*known* failure is one that is declared, and not red. A status is *conclusive* if real ranks ran:
``skipped`` is not. ``Verdict.why`` is one line, the first of the message or the reason of a skip.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_distcompat.excerpt import visible
from pytest_distcompat.report.causes import cells_of, constant_part, wording
from pytest_distcompat.report.document import Report, counts
from pytest_distcompat.report.pairing import earlier_verdicts
from pytest_distcompat.report.result import Change
from pytest_distcompat.report.values import ValueChange, value_changes, value_lines
from pytest_distcompat.status import Verdict

#: The settings that select cells: if they differ, other verdicts are no surprise.
SELECTING = (
    "strategies",
    "precisions",
    "drivers",
    "profile",
    "world_size",
    "nodes",
    "gpus",
    "budget",
    "shard",
)
#: The counts that ``Comparison.counts`` has. A suite that stops running shows in the first three.
#: ``fixed?`` is the status of a check that is declared to fail and does not.
COUNTED = ("selected", "ran", "skipped", "unreached", "red", "known", "fixed?")

#: A value in the earlier and in the later report, such as two versions of one package.
BeforeAndNow = tuple[str, str]
#: A count in the earlier and in the later report.
_Counts = tuple[int, int]


@dataclass
class Comparison:
    """Differences between two reports.

    Attributes:
        broken: Verdicts that are red now and were not, or are red in another way: a crash instead
            of a failed check, or with a failed teardown.
        fixed: Verdicts that were red, or known failures, and are neither now.
        missing: Verdicts that ran before and not now.
        still: Verdicts that are as red as they were.
        otherwise: Those of ``still`` that have another message, numbers aside.
        new: Verdicts that were not selected before, and are not red.
        versions: The packages whose versions differ, as ``{"torch": ("2.12.0", "2.13.0")}``.
        settings: The settings that differ, of those in ``SELECTING``.
        counts: Each name in ``COUNTED`` to the number of such verdicts before and now.
        values: The cells whose trainings compute or save something else, whatever their verdicts.
    """

    broken: list[Change] = field(default_factory=list)
    fixed: list[Change] = field(default_factory=list)
    missing: list[Change] = field(default_factory=list)
    still: list[Change] = field(default_factory=list)
    otherwise: list[Change] = field(default_factory=list)
    new: list[Change] = field(default_factory=list)
    versions: dict[str, BeforeAndNow] = field(default_factory=dict)
    settings: dict[str, BeforeAndNow] = field(default_factory=dict)
    counts: dict[str, _Counts] = field(default_factory=dict)
    values: list[ValueChange] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the lines for a terminal, the newly broken first.

        Control characters are escaped.
        """
        for line in self._lines():
            yield visible(line)

    def _lines(self) -> Iterator[str]:
        """Yield the lines with control characters as they are."""
        numbers = [
            f"{len(self.broken)} newly broken",
            f"{len(self.missing)} newly missing",
            f"{len(self.fixed)} newly fixed",
            f"{len(self.still)} still broken",
            f"{len(self.new)} new",
        ]
        yield ", ".join(numbers)
        if self.versions:
            yield f"versions: {changed_values(self.versions)}"
        if self.settings:
            yield f"settings: {changed_values(self.settings)}"
        yield _counts_text(self.counts)
        yield from _by_cause("newly broken", self.broken)
        yield from _missing_lines(self.missing)
        yield from _by_cause("newly fixed", self.fixed)
        yield from _by_cause("still broken, otherwise", self.otherwise)
        yield from value_lines(self.values)

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the differences for the later report; ``name`` is the earlier report's file."""
        return {
            "file": name,
            "text": list(self.lines()),
            "broken": list(map(vars, self.broken)),
            "fixed": list(map(vars, self.fixed)),
            "missing": list(map(vars, self.missing)),
            "values": [change.to_json() for change in self.values],
        }


def changed_values(changed: Mapping[str, BeforeAndNow]) -> str:
    """Return the values before and now as one text: ``torch 2.12.0 -> 2.13.0``."""
    texts = []
    for name, (before, after) in changed.items():
        texts.append(f"{name} {before} -> {after}")
    return ", ".join(texts)


def _counts_text(counts_by_name: Mapping[str, _Counts]) -> str:
    """Return the counts as one text: ``selected 96, ran 94 -> 90``."""
    texts = []
    for name, (before, after) in counts_by_name.items():
        if before == after:
            texts.append(f"{name} {after}")
        else:
            texts.append(f"{name} {before} -> {after}")
    return ", ".join(texts)


@dataclass(frozen=True)
class _MissingFrom:
    """What the missing verdicts of one line share: cell and driver, and why they are missing."""

    cell: str
    driver: str
    why: str


def _missing_lines(missing: Iterable[Change]) -> Iterator[str]:
    """Yield a line for each cell and reason, with the checks that are missing in the cell."""
    checks_of: dict[_MissingFrom, list[str]] = {}
    for change in missing:
        key = _MissingFrom(change.cell, change.driver, change.why)
        checks_of.setdefault(key, []).append(change.check)
    for key, checks in checks_of.items():
        cell = f"{key.cell} ({key.driver})"
        names = ", ".join(checks)
        yield f"newly missing: {cell}: {names}: {key.why}"


def _by_cause(title: str, changes: Iterable[Change]) -> Iterator[str]:
    """Yield a line for each cause, with the verdicts beneath it if there are several.

    Verdicts have one cause if their messages are equal, numbers aside.

    Args:
        title: The beginning of each line, as ``newly broken``.
        changes: The verdicts that changed.
    """
    changes_by_cause: dict[str, list[Change]] = {}
    for change in changes:
        # The text with ``#`` for each number: ``# parameters have other names``.
        cause = constant_part(change.what)
        changes_by_cause.setdefault(cause, []).append(change)
    for alike in changes_by_cause.values():
        first = alike[0]
        if len(alike) == 1:
            yield f"{title}: {first}"
            continue
        yield f"{title}: {len(alike)} verdicts: {first.what}"
        for cell, checks in cells_of(alike).items():
            yield f"  {cell}: {', '.join(checks)}"


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports, verdict by verdict."""
    versions_before = before.session.get("versions", {})
    versions_after = after.session.get("versions", {})
    comparison = Comparison(
        versions=differing(versions_before, versions_after),
        settings=differing(_settings(before), _settings(after)),
    )
    counts_before = counts(before)
    counts_after = counts(after)
    for name in COUNTED:
        comparison.counts[name] = (counts_before[name], counts_after[name])
    # The index of a later verdict -> the earlier verdict on the same check in the same cell.
    earlier = earlier_verdicts(before, after)
    for index, result in enumerate(after.results):
        _add_verdict(comparison, earlier.get(index), result)
    _add_vanished(comparison, before, after, earlier.values())
    comparison.values = value_changes(before, after)
    return comparison


def _add_verdict(comparison: Comparison, earlier: Verdict | None, result: Verdict) -> None:
    """Add a later verdict to the list of the comparison that it belongs to.

    A verdict that is as good as it was belongs to none.

    Args:
        comparison: The comparison, which is changed in place.
        earlier: The earlier verdict on the same check in the same cell; None if there was none.
        result: The later verdict.
    """
    status_before = earlier.status if earlier else ""
    change = _change(result, status_before, result.status, result.why)
    if result.red:
        _add_red(comparison, earlier, result, change)
    elif earlier is None:
        comparison.new.append(change)
    elif not result.status.conclusive:
        # The check was skipped, or ran without real ranks: what ran before is missing.
        if earlier.status.conclusive:
            comparison.missing.append(change)
    elif earlier.red or _passes_at_last(earlier, result):
        comparison.fixed.append(change)


def _passes_at_last(earlier: Verdict, result: Verdict) -> bool:
    """Tell whether a check passes that failed before as it was declared to."""
    return earlier.status == "known" and result.status == "passed"


def _add_red(
    comparison: Comparison, earlier: Verdict | None, result: Verdict, change: Change
) -> None:
    """Add a verdict that is red now: it is newly broken, or as broken as it was.

    Args:
        comparison: The comparison, which is changed in place.
        earlier: The earlier verdict; None if there was none.
        result: The later verdict.
        change: Both, as the comparison lists them.
    """
    had_teardown_error = earlier is not None and bool(earlier.teardown)
    if result.teardown and not had_teardown_error:
        why = f"{result.why}; and in its teardown: {result.teardown}"
        comparison.broken.append(dataclasses.replace(change, why=why))
    elif earlier is None or earlier.status != result.status:
        comparison.broken.append(change)
    else:
        comparison.still.append(change)
        if _wording_without_paths(earlier) != _wording_without_paths(result):
            why = f"{result.why}; it was: {earlier.why}"
            comparison.otherwise.append(dataclasses.replace(change, why=why))


def _wording_without_paths(result: Verdict) -> str:
    """Return what the message of a verdict says, without what differs from run to run.

    Names of temporary directories, numbers and ranks are left out.
    """
    return re.sub(r"\S*/\S*", "", wording(result))


def _add_vanished(
    comparison: Comparison, before: Report, after: Report, paired: Iterable[Verdict]
) -> None:
    """Add the earlier verdicts for which there is no later one, unless they were skipped.

    Args:
        comparison: The comparison, which is changed in place.
        before: The earlier report.
        after: The later report.
        paired: The earlier verdicts for which there is a later one.
    """
    unreached = set(after.unreached)
    # By identity: two verdicts may be equal.
    paired_ids = {id(verdict) for verdict in paired}
    for verdict in before.results:
        if id(verdict) in paired_ids or verdict.status == "skipped":
            continue
        why = "not reached" if verdict.nodeid in unreached else "not selected"
        comparison.missing.append(_change(verdict, verdict.status, "", why))


def _change(result: Verdict, before: str, after: str, why: str) -> Change:
    """Return the change of a verdict: its status before and after, empty where there was none."""
    return Change(result.suite, result.driver, result.cell, result.check, before, after, why)


def _settings(report: Report) -> dict[str, str]:
    """Return the values of the settings that select cells, as ``{"profile": "default"}``.

    A report has each setting as ``{"value": "default", ...}``. One of another release of this
    package may lack some.
    """
    settings = report.session.get("settings", {})
    values = {}
    for name in SELECTING:
        if name in settings:
            values[name] = str(settings[name]["value"]) or "all"
    return values


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, BeforeAndNow]:
    """Return the names whose values differ, each with its value before and after.

    ``none`` stands for the value on the side that lacks the name.
    """
    names = dict.fromkeys((*before, *after))
    different = {}
    for name in names:
        value_before = before.get(name, "none")
        value_after = after.get(name, "none")
        if value_before != value_after:
            different[name] = (value_before, value_after)
    return different
