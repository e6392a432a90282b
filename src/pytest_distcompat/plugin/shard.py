"""Shards of a session: machines that share nothing run a part of the tests each (``--distcompat-shard 2/3``)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_distcompat.failures import UsageProblem

if TYPE_CHECKING:
    from pytest_distcompat.report.document import Report

#: The file in the store with the division, which xdist's controller reads.
FILE = "shards.json"
#: The assumed duration of an ordinary test, in those of a check or of a marked test.
ORDINARY = 0.01


@dataclass(frozen=True)
class Shard:
    """A part of a session, counted from 1, and the number of parts."""

    number: int
    count: int


def read_shard(text: str) -> Shard | None:
    """Return the shard that a text says; None for an empty text. Raises UsageProblem for any other."""
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageProblem(f"{text!r} is not right: expected one part of several, as 1/3, 2/3 or 3/3.")
    return Shard(int(match[1]), int(match[2]))


def divide(sizes: Mapping[str, float], last: Report | None, count: int) -> list[list[str]]:
    """Divide units into shards of about equal duration, in the same way on every machine.

    A run that several units share counts once in a shard. Units are placed twice, the longest first: each where it ends
    earliest, and each where it also adds little, which keeps units that share long runs together. The shorter division counts.

    Args:
        sizes: The number of tests in each unit.
        last: The report with the seconds of each unit's runs; a unit that it lacks takes the median for each of its tests.
        count: The number of shards.
    """
    seconds = _seconds_of_runs(sizes, last)
    total = {unit: sum(of_unit.values()) for unit, of_unit in seconds.items()}
    order = sorted(sizes, key=lambda unit: (-total[unit], unit))
    where_earliest = _place(order, seconds, count, weight=0)
    where_least_added = _place(order, seconds, count, weight=1)
    if where_least_added.longest < where_earliest.longest:
        return where_least_added.shards
    return where_earliest.shards


def _seconds_of_runs(sizes: Mapping[str, float], last: Report | None) -> dict[str, dict[str, float]]:
    """Return the runs that each unit needs, by their ids, each with its seconds."""
    runs: dict[str, dict[str, float]] = {}
    if last is not None:
        seconds = {run["id"]: float(run.get("seconds") or 0.0) for run in last.runs}
        for row in last.rows:
            unit = f"{row.place}[{row.cell}]"
            if unit in sizes:
                runs[unit] = {run: seconds.get(run, 0.0) for run in row.runs}
    known = []
    for unit, of_unit in runs.items():
        seconds_of_test = sum(of_unit.values()) / sizes[unit]
        if seconds_of_test:
            known.append(seconds_of_test)
    usual = statistics.median(known or [1.0])
    for unit, size in sizes.items():
        if unit not in runs:
            # A unit without known runs is one run of its own.
            runs[unit] = {f"of {unit}": usual * size}
    return runs


@dataclass(frozen=True)
class _Division:
    """The units of each shard, and the seconds that the longest shard takes."""

    longest: float
    shards: list[list[str]]


def _place(order: Sequence[str], seconds: Mapping[str, Mapping[str, float]], count: int, weight: int) -> _Division:
    """Place units one after the other, each in the shard that ends earliest with it.

    Args:
        order: The units.
        seconds: The runs of each unit, each with its seconds; a run of several units counts once in a shard.
        count: The number of shards.
        weight: How much the seconds that a unit adds to a shard count, beside the time at which the shard would end.
    """
    shards: list[list[str]] = [[] for _ in range(count)]
    runs_of_shard: list[set[str]] = [set() for _ in range(count)]
    ends = [0.0] * count
    for unit in order:
        best = 0
        best_added = 0.0
        best_rank: tuple[float, int] | None = None
        for number in range(count):
            added = 0.0
            for run, duration in seconds[unit].items():
                if run not in runs_of_shard[number]:
                    added += duration
            # Among shards that are alike the one with the fewest units, else the first.
            rank = (ends[number] + (1 + weight) * added, len(shards[number]))
            if best_rank is None or rank < best_rank:
                best = number
                best_added = added
                best_rank = rank
        shards[best].append(unit)
        runs_of_shard[best].update(seconds[unit])
        ends[best] += best_added
    return _Division(max(ends), [sorted(units) for units in shards])
