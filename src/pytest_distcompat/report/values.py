"""Values of trainings compared between two reports: bit by bit, within the rounding of the law, or beyond it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pytest_distcompat.grouping import grouped
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row

#: How far a number may be off in the first step in which any differs, relative to it: a few roundings of float32.
ROUNDING = 1e-6
#: How far one may be off in later steps where parity has no tolerance for it; training enlarges a difference.
LATER = 1e-4
#: The tolerance by which parity would take two numbers of a step for equal.
_TOLERANCES = {"loss": "loss_tolerance", "grad_norm": "grad_norm_tolerance"}
#: Stands for the step of what is known of the trained model only.
_AFTER_ALL = 10**9
#: How many cells and files a line names.
_NAMED = 3


class Extent(Enum):
    """How much the values of a cell differ; the value is the text before the number of cells."""

    BEYOND = "values changed beyond rounding"
    FORMAT = "files changed their format"
    ROUNDED = "values changed within rounding"


@dataclass(frozen=True)
class ValueChange:
    """A cell whose training computes or saves something else than in the earlier report, whether its laws hold or not.

    Attributes:
        driver: Its driver.
        cell: The cell's id.
        extent: How much differs.
        first: What differs first: ``step 1 parameter``, ``the loss of step 2``, or the paths of files.
        relative: The largest difference of a number, relative to it; 0 if no number differs.
    """

    driver: str
    cell: str
    extent: Extent
    first: str
    relative: float = 0.0

    @property
    def what(self) -> str:
        """Return what differs, and by how much."""
        if self.extent is Extent.FORMAT:
            return self.first
        if not self.relative:
            return f"{self.first}; no number of a step shows it"
        return f"{self.first}; numbers differ by up to {self.relative:.2g} of them"

    def to_json(self) -> dict[str, Any]:
        """Return it as the JSON of a comparison has it."""
        return {
            "driver": self.driver,
            "cell": self.cell,
            "extent": self.extent.name.lower(),
            "what": self.what,
        }


def value_changes(before: Report, after: Report) -> list[ValueChange]:
    """Return the cells of both reports whose values differ, a cell for its values and once more for its files."""
    earlier = {(row.suite, row.driver, row.cell): row for row in before.rows if row.values}
    changes: list[ValueChange] = []
    for row in after.rows:
        was = earlier.get((row.suite, row.driver, row.cell))
        if was is not None and row.values:
            changes += _row_changes(was, row)
    return changes


def _row_changes(was: Row, row: Row) -> Iterator[ValueChange]:
    """Yield what differs between the values of a cell."""
    first = _first_difference(was.values, row.values)
    if first:
        relative, beyond = _numeric_difference(was, row)
        extent = Extent.BEYOND if beyond else Extent.ROUNDED
        yield ValueChange(row.driver, row.cell, extent, first, relative)
    files = _changed_files(was.values.get("files", {}), row.values.get("files", {}))
    if files:
        yield ValueChange(row.driver, row.cell, Extent.FORMAT, _named(files))


def _first_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return what differs first, of what both have; empty if nothing does."""
    digests_before: Mapping[str, str] = before.get("digests", {})
    digests_after: Mapping[str, str] = after.get("digests", {})
    differing_digests = [
        name for name, digest in digests_after.items() if digests_before.get(name, digest) != digest
    ]
    differing_pairs = [pair for pair in _number_pairs(before, after) if pair.before != pair.after]
    if not differing_pairs:
        return differing_digests[0] if differing_digests else ""
    first = min(differing_pairs, key=_step_of_number)
    if differing_digests and _step_of(differing_digests[0]) < _step_of_number(first):
        return differing_digests[0]
    if first.name == "outputs":
        return "the outputs of the trained model"
    return f"{first.name} of step {first.place}"


def _step_of(name: str) -> int:
    """Return the step after which a digest was taken: 0 for one from before the first, a large one for one after the last."""
    action, _, rest = name.partition(" ")
    if action == "build":
        return 0
    number = rest.partition(" ")[0]
    return int(number) if action == "step" else _AFTER_ALL


def _step_of_number(pair: _NumberPair) -> int:
    """Return the step that a number is of; outputs come after all."""
    return pair.place if pair.name != "outputs" else _AFTER_ALL


@dataclass(frozen=True)
class _NumberPair:
    """A number of both reports: its name, its place in its list from 1, and the two values."""

    name: str
    place: int
    before: float | None
    after: float | None

    @property
    def relative(self) -> float:
        """The difference relative to the larger number; 1 where one of the two is none."""
        if self.before == self.after:
            return 0.0
        if self.before is None or self.after is None:
            return 1.0
        return abs(self.before - self.after) / max(abs(self.before), abs(self.after))


def _number_pairs(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[_NumberPair]:
    """Yield the numbers of two rows' values; one that only one of them has is None in the other."""
    numbers_before: Mapping[str, Sequence[float | None]] = before.get("numbers", {})
    numbers_after: Mapping[str, Sequence[float | None]] = after.get("numbers", {})
    for name in dict.fromkeys((*numbers_before, *numbers_after)):
        earlier = numbers_before.get(name)
        later = numbers_after.get(name)
        # A training that broke off early has fewer steps, and is red; one whose losses are all infinite has no numbers.
        if earlier is None:
            earlier = [None] * len(later or ())
        if later is None:
            later = [None] * len(earlier)
        for place, (was, number) in enumerate(zip(earlier, later, strict=False), 1):
            yield _NumberPair(name, place, was, number)


def _numeric_difference(was: Row, row: Row) -> tuple[float, bool]:
    """Return the largest relative difference of a number, and whether it is more than rounding.

    Later steps enlarge a difference. So the first step in which numbers differ may be off by a few roundings only, and all
    steps by what parity allows.
    """
    differing_pairs = [
        pair for pair in _number_pairs(was.values, row.values) if pair.before != pair.after
    ]
    if not differing_pairs:
        return 0.0, False
    first_step = min(_step_of_number(pair) for pair in differing_pairs)
    beyond = False
    for pair in differing_pairs:
        is_first = _step_of_number(pair) == first_step
        allowed = ROUNDING if is_first else _tolerance(row, pair)
        beyond = beyond or pair.relative > allowed
    return max(pair.relative for pair in differing_pairs), beyond


def _tolerance(row: Row, pair: _NumberPair) -> float:
    """Return how far a number of a later step may be off: what parity allows, else what it allows a loss in float32."""
    allowed = row.steps.get(_TOLERANCES.get(pair.name, ""), [])
    if pair.place > len(allowed):
        return LATER
    return allowed[pair.place - 1] or LATER


def _changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return what changed of each file that is new, gone, or of another format."""
    changed = []
    for path in dict.fromkeys((*before, *after)):
        if path not in after:
            changed.append(f"{path} is gone")
        elif path not in before:
            changed.append(f"{path} is new")
        elif before[path] != after[path]:
            changed.append(f"{path} has other keys, shapes or dtypes")
    return changed


def _named(texts: Sequence[str]) -> str:
    """Return some of the texts, and how many more there are."""
    named = ", ".join(texts[:_NAMED])
    if len(texts) > _NAMED:
        named += f" and {len(texts) - _NAMED} more"
    return named


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest of a row's values, equal for equal values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def value_lines(changes: Iterable[ValueChange]) -> Iterator[str]:
    """Yield a line for each extent, with a line beneath it for each first difference and the cells that have it."""
    by_extent = grouped((change.extent, change) for change in changes)
    for extent in Extent:
        found = by_extent.get(extent, [])
        if not found:
            continue
        noun = "cell" if len(found) == 1 else "cells"
        yield f"{extent.value}: {len(found)} {noun}"
        by_difference = grouped((change.first, change) for change in found)
        for alike in by_difference.values():
            largest = max(alike, key=lambda change: change.relative)
            cells = _named([f"{change.cell} ({change.driver})" for change in alike])
            yield f"  {largest.what}: {cells}"
