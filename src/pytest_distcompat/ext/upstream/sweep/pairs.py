"""Pairs of settings: rows that have every two values together, and what fails of a row.

``distcompat settings --pairs STRATEGY`` (``command.py``) tries settings of libraries together,
since two that work alone may fail together. A row is a tuple of settings that one cell has, such as
``("AdamW.amsgrad=true", "fully_shard.reshard_after_forward=false")``. ``covering_rows`` makes a few
rows in which each two values meet. ``reduced_failures`` takes a row that fails apart, to the
smallest parts that still fail: often a pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from pytest_distcompat.failures import UsageProblem

#: Settings that are tried together, or a part of them.
_Row = tuple[str, ...]
#: Tries a row, and returns how it failed as text; empty if all checks pass.
Outcome = Callable[[_Row], str]
#: Matches what differs between failures of one cause: it is chance which rank fails first, and
#: other settings give other numbers.
_CHANCE = re.compile(r"\branks? \d+|\d[\d.e+-]*")


def covering_rows(values: Mapping[str, Sequence[str]]) -> list[_Row]:
    """Return rows of settings in which each two values of two fields meet.

    It is a covering array of strength 2. A row may leave out a field, which then has its default.

    Args:
        values: Field -> its values other than the default: ``{"AdamW.amsgrad": ("true",)}``.
    """
    try:
        from covertable import make
    except ImportError:
        raise UsageProblem(
            "pairs need covertable: pip install 'pytest-distcompat[pairwise]'"
        ) from None
    levels_by_field = []
    for name, field_values in values.items():
        settings = [f"{name}={value}" for value in field_values]
        # The empty text is the field's default.
        levels_by_field.append(["", *settings])
    if len(levels_by_field) < 2:
        return []
    return [_without_defaults(levels) for levels in make(levels_by_field)]


def _without_defaults(levels: Iterable[str]) -> _Row:
    """Return the settings of a row that are no defaults."""
    return tuple(level for level in levels if level)


def smallest(row: _Row, fails: Callable[[_Row], bool]) -> _Row:
    """Return a part of a failing row that fails, and passes without any one of its settings.

    By removing halves, quarters and so on (Zeller and Hildebrandt, "Simplifying and isolating
    failure-inducing input").

    Args:
        row: A row that fails.
        fails: Tells whether a part fails.
    """
    # How many settings are removed at a time.
    size = max(len(row) // 2, 1)
    while True:
        start = 0
        before = row
        while start < len(row):
            rest = row[:start] + row[start + size :]
            if rest and fails(rest):
                row = rest
            else:
                start += size
        # No single setting could be removed.
        if size == 1 and row == before:
            return row
        size = max(size // 2, 1)


def reduced_failures(
    row: _Row, outcome: Outcome, known: Collection[_Row] = ()
) -> Iterator[tuple[_Row, str]]:
    """Yield each smallest failing part of a row, with its outcome.

    Of a part that fails, the last setting is taken out of the row, and the rest of the row is tried
    again: it may have another part that fails.

    Args:
        row: The settings.
        outcome: Tries settings, and returns how they fail.
        known: Failing parts of earlier rows. Of each that is in this row too, the last setting is
            taken out first, so that it is not found again.
    """
    for part in known:
        if set(part) <= set(row):
            row = _without(row, part[-1])
    while row:
        failure = outcome(row)
        if not failure:
            return
        part = _smallest_with_failure(row, outcome, failure)
        yield part, failure
        row = _without(row, part[-1])


def _smallest_with_failure(row: _Row, outcome: Outcome, failure: str) -> _Row:
    """Return a smallest part of a row that fails as the row does, chance aside."""
    cause = _CHANCE.sub("", failure)

    def fails_alike(part: _Row) -> bool:
        return _CHANCE.sub("", outcome(part)) == cause

    return smallest(row, fails_alike)


def _without(row: _Row, setting: str) -> _Row:
    """Return the row without that setting."""
    return tuple(other for other in row if other != setting)
