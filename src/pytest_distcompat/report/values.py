"""Compare what trainings computed and saved in two reports: bit by bit, then within rounding.

All *checks* of a suite may pass with two versions of torch although a training computes something
else with the new one. So the *row* of each *cell* (a configuration of the trainer, as
``fsdp2-fp32-w2``: strategy, precision, 2 ranks) has ``values`` in a report, if the cell trains in
float32. ``report.compare`` calls ``value_changes`` with two reports, and ``value_lines`` with the
result. ``Row.values`` is a dictionary::

    {"digests": {"build parameter": "8f...", "step 1 parameter": "3a...", ...},  # in order
     "numbers": {"loss": [4.8, 4.7, ...], "grad_norm": [...], "outputs": [...]},
     "files": {"export/model.safetensors": "..."}}

A digest is a hash of tensors after an action, for example of all parameters after step 1. A list of
numbers has one for each step, but ``outputs`` are those of the trained model. The text of a file
has its format and a digest of its keys, shapes and dtypes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row

#: The largest relative difference that counts as rounding in the first step in which any number
#: differs: a few roundings of float32.
ROUNDING = 1e-6
#: The largest one in later steps, where training has enlarged it. It is for numbers for which the
#: check ``parity`` has no tolerance.
LATER = 1e-4
#: The name of a list of numbers to the key of ``Row.steps`` with the tolerances of ``parity``, the
#: check that compares losses with a training in one process.
_TOLERANCES = {"loss": "loss_tolerance", "grad_norm": "grad_norm_tolerance"}
#: The number of the step that stands for all that is computed or saved after the training.
_AFTER_TRAINING = 10**9
#: How many cells and files a line names.
_NAMED = 3


class Extent(Enum):
    """How much the values of a cell differ; the text stands before the number of such cells."""

    BEYOND = "values changed beyond rounding"
    FORMAT = "files changed their format"
    ROUNDED = "values changed within rounding"


@dataclass(frozen=True)
class ValueChange:
    """A cell whose training computes or saves something else than in the earlier report.

    Its checks may pass in both.

    Attributes:
        driver: The trainer, as ``accelerate``.
        cell: The cell's id, as ``fsdp2-fp32-w2``.
        extent: How much differs.
        first: What differs first: ``step 1 parameter``, ``loss of step 2``, or the paths of files
            with what has changed in them.
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
    """Return the changes of the cells that both reports have, in their values and their files."""
    earlier_rows: dict[tuple[str, str, str], Row] = {}
    for row in before.rows:
        if row.values:
            earlier_rows[row.suite, row.driver, row.cell] = row
    changes: list[ValueChange] = []
    for row in after.rows:
        was = earlier_rows.get((row.suite, row.driver, row.cell))
        if was is not None and row.values:
            changes += _row_changes(was, row)
    return changes


def _row_changes(was: Row, row: Row) -> Iterator[ValueChange]:
    """Yield what differs between the values of a cell: at most its values and its files.

    Args:
        was: The cell's row in the earlier report.
        row: The cell's row in the later report.
    """
    first = _first_difference(was.values, row.values)
    if first:
        relative, beyond = _numeric_difference(was, row)
        extent = Extent.BEYOND if beyond else Extent.ROUNDED
        yield ValueChange(row.driver, row.cell, extent, first, relative)
    files_before = was.values.get("files", {})
    files = _changed_files(files_before, row.values.get("files", {}))
    if files:
        yield ValueChange(row.driver, row.cell, Extent.FORMAT, _named(files))


def _first_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return what differs first in the order of the training; empty if nothing does.

    Digests and numbers are of the same steps. Of both in one step the number is named.

    Args:
        before: ``Row.values`` of the earlier report.
        after: ``Row.values`` of the later report.
    """
    digest_name = _first_other_digest(before.get("digests", {}), after.get("digests", {}))
    differing_pairs = _differing_pairs(before, after)
    if not differing_pairs:
        return digest_name
    first = min(differing_pairs, key=_step_of_number)
    if digest_name and _step_of(digest_name) < _step_of_number(first):
        return digest_name
    if first.name == "outputs":
        return "the outputs of the trained model"
    return f"{first.name} of step {first.place}"


def _first_other_digest(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the name of the first digest that differs; empty if none does.

    One that only one report has is no difference: that report may be of another release.
    """
    for name, digest in after.items():
        if before.get(name, digest) != digest:
            return name
    return ""


def _step_of(name: str) -> int:
    """Return the step after which a digest was taken; 0 for one that was taken before the first.

    Args:
        name: The action and what was hashed, as ``step 2 parameter`` or ``build parameter``.
    """
    action, _, rest = name.partition(" ")
    if action == "build":
        return 0
    if action != "step":
        return _AFTER_TRAINING
    number, _, _ = rest.partition(" ")
    return int(number)


def _step_of_number(pair: _NumberPair) -> int:
    """Return the step that a number belongs to; outputs are computed after the training."""
    if pair.name == "outputs":
        return _AFTER_TRAINING
    return pair.place


@dataclass(frozen=True)
class _NumberPair:
    """One number in both reports.

    Attributes:
        name: The name of its list: ``loss``, ``outputs``.
        place: Its place in the list, from 1. That is the number of the step, but for outputs.
        before: The value in the earlier report; None if it has none.
        after: The value in the later report; None if it has none.
    """

    name: str
    place: int
    before: float | None
    after: float | None

    @property
    def relative(self) -> float:
        """The difference relative to the larger number; 1 if one of the two is missing."""
        if self.before == self.after:
            return 0.0
        if self.before is None or self.after is None:
            return 1.0
        difference = abs(self.before - self.after)
        return difference / max(abs(self.before), abs(self.after))


#: The values of a row: ``Row.values``.
_Values = Mapping[str, Any]
#: The numbers of a row's values, by the name of their list.
_Numbers = Mapping[str, Sequence[float | None]]


def _differing_pairs(before: _Values, after: _Values) -> list[_NumberPair]:
    """Return the numbers of two rows' values that differ."""
    return [pair for pair in _number_pairs(before, after) if pair.before != pair.after]


def _number_pairs(before: _Values, after: _Values) -> Iterator[_NumberPair]:
    """Yield each number of two rows' values; what only one of them has is None in the other."""
    numbers_before: _Numbers = before.get("numbers", {})
    numbers_after: _Numbers = after.get("numbers", {})
    for name in dict.fromkeys((*numbers_before, *numbers_after)):
        earlier = numbers_before.get(name)
        later = numbers_after.get(name)
        # A training with only infinite losses has no list. One that ended early has a shorter list:
        # its missing steps are no change of values, as it is red anyway.
        if earlier is None:
            earlier = [None] * len(later or ())
        if later is None:
            later = [None] * len(earlier)
        pairs = zip(earlier, later, strict=False)
        for place, (number_before, number_after) in enumerate(pairs, 1):
            yield _NumberPair(name, place, number_before, number_after)


def _numeric_difference(was: Row, row: Row) -> tuple[float, bool]:
    """Return the largest relative difference of a number, and whether any is more than rounding.

    Training enlarges a difference. So in the first step in which any number differs, only a few
    roundings are allowed, and in later steps what the check ``parity`` allows.

    Args:
        was: The cell's row in the earlier report.
        row: The cell's row in the later report.

    Returns:
        For example ``(3e-7, False)``; ``(0.0, False)`` if no number differs.
    """
    differing_pairs = _differing_pairs(was.values, row.values)
    if not differing_pairs:
        return 0.0, False
    first_step = min(map(_step_of_number, differing_pairs))
    largest = 0.0
    beyond = False
    for pair in differing_pairs:
        allowed = ROUNDING
        if _step_of_number(pair) != first_step:
            allowed = _tolerance(row, pair)
        if pair.relative > allowed:
            beyond = True
        largest = max(largest, pair.relative)
    return largest, beyond


def _tolerance(row: Row, pair: _NumberPair) -> float:
    """Return by how much a number of a later step may differ: by what parity allows, if known."""
    tolerance_name = _TOLERANCES.get(pair.name, "")
    # ``Row.steps`` has a list for each name, with a number for each step.
    allowed = row.steps.get(tolerance_name, [])
    if pair.place > len(allowed):
        return LATER
    # None or 0 says that parity has no tolerance for this step.
    return allowed[pair.place - 1] or LATER


def _changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return a text for each file that is new, gone, or of another format.

    Args:
        before: Path of a file to the text on its format, in the earlier report.
        after: The same for the later report.
    """
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
    """Return the first texts, and how many more there are: ``a, b, c and 2 more``."""
    named = ", ".join(texts[:_NAMED])
    if len(texts) > _NAMED:
        named += f" and {len(texts) - _NAMED} more"
    return named


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest of ``Row.values``, equal for equal values; ``report.trend`` compares it."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def value_lines(changes: Iterable[ValueChange]) -> Iterator[str]:
    """Yield lines for a terminal: how many cells changed how much, and what differs first."""
    all_changes = list(changes)
    for extent in Extent:
        changes_of_extent = [change for change in all_changes if change.extent is extent]
        if not changes_of_extent:
            continue
        noun = "cell" if len(changes_of_extent) == 1 else "cells"
        yield f"{extent.value}: {len(changes_of_extent)} {noun}"
        changes_by_difference: dict[str, list[ValueChange]] = {}
        for change in changes_of_extent:
            changes_by_difference.setdefault(change.first, []).append(change)
        for alike in changes_by_difference.values():
            largest = max(alike, key=lambda change: change.relative)
            cells = [f"{change.cell} ({change.driver})" for change in alike]
            yield f"  {largest.what}: {_named(cells)}"
