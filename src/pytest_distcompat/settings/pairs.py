"""Pairs of settings: rows that have every two values together, and the smallest part of a row that still fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from pytest_distcompat.failures import UsageProblem

#: What came of a row: nothing if all claims hold, else how it failed.
Outcome = Callable[[tuple[str, ...]], str]
#: What differs between failures of one cause: it is chance which rank fails first, and other settings give other numbers.
_CHANCE = re.compile(r"\branks? \d+|\d[\d.e+-]*")


def covering_rows(values: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return a covering array of strength 2: rows of settings, in which each two values of two fields meet.

    Args:
        values: The values of each field other than its default, which is one more.
    """
    try:
        from covertable import make
    except ImportError:
        raise UsageProblem("pairs need covertable: pip install 'pytest-distcompat[pairwise]'") from None
    factors = [["", *(f"{name}={value}" for value in found)] for name, found in values.items()]
    return [tuple(filter(None, row)) for row in make(factors)] if len(factors) > 1 else []


def smallest(row: tuple[str, ...], fails: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """Return a part of a failing row that fails, and no longer does without any one of its settings.

    By removing halves, quarters and so on (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input").
    """
    size = max(len(row) // 2, 1)
    while True:
        start, before = 0, row
        while start < len(row):
            rest = row[:start] + row[start + size :]
            if rest and fails(rest):
                row = rest
            else:
                start += size
        if size == 1 and row == before:
            return row
        size = max(size // 2, 1)


def reduced_failures(
    row: tuple[str, ...], outcome: Outcome, found: Collection[tuple[str, ...]] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each smallest failing part of a row, with its outcome.

    What was found, in this row or an earlier one, is taken out by its last setting, and the rest is tried again: a refusal
    must not hide other pairs.
    """
    for part in found:
        if set(part) <= set(row):
            row = tuple(one for one in row if one != part[-1])
    while row and (how := outcome(row)):
        alike = _CHANCE.sub("", how)
        part = smallest(row, lambda rest, alike=alike: _CHANCE.sub("", outcome(rest)) == alike)  # type: ignore[misc]
        yield part, how
        row = tuple(one for one in row if one != part[-1])
