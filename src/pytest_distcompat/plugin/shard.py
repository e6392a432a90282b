"""Shards of a session (``--distcompat-shard 2/3``).

Machines that share nothing run a part of the tests each.
"""

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
#: The runs of each unit, by their ids, each with its seconds.
SecondsOfRuns = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Shard:
    """A part of a session, counted from 1, and the number of parts."""

    number: int
    count: int


def read_shard(text: str) -> Shard | None:
    """Return the shard that a text says; None for an empty text.

    Raises:
        UsageProblem: The text is neither.
    """
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    number = int(match[1]) if match else 0
    shards = int(match[2]) if match else 0
    if not 1 <= number <= shards:
        raise UsageProblem(
            f"{text!r} is not right: expected one part of several, as 1/3, 2/3 or 3/3."
        )
    return Shard(number, shards)


def divide(sizes: Mapping[str, float], last: Report | None, count: int) -> list[list[str]]:
    """Divide units into shards of about equal duration, in the same way on every machine.

    A run that several units share counts once in a shard. Units are placed twice, the longest
    first: each where it ends earliest, and each where it also adds little, which keeps units that
    share long runs together. The shorter division counts.

    Args:
        sizes: The number of tests in each unit.
        last: The report with the seconds of each unit's runs; a unit that it lacks takes the median
            for each of its tests.
        count: The number of shards.
    """
    seconds = _seconds_of_runs(sizes, last)

    def longest_first(unit: str) -> tuple[float, str]:
        return -sum(seconds[unit].values()), unit

    order = sorted(sizes, key=longest_first)
    where_earliest = _place(order, seconds, count, weight=0)
    where_least_added = _place(order, seconds, count, weight=1)
    if where_least_added.longest < where_earliest.longest:
        return where_least_added.shards
    return where_earliest.shards


def _seconds_of_runs(
    sizes: Mapping[str, float], last: Report | None
) -> dict[str, dict[str, float]]:
    """Return the runs that each unit needs, by their ids, each with its seconds."""
    runs = _recorded_runs(last) if last is not None else {}
    known = []
    for unit, size in sizes.items():
        total = sum(runs.get(unit, {}).values())
        if total:
            known.append(total / size)
    usual = statistics.median(known or [1.0])
    seconds = {}
    for unit, size in sizes.items():
        # A unit without known runs is one run of its own.
        run_of_its_own = {f"of {unit}": usual * size}
        seconds[unit] = runs.get(unit, run_of_its_own)
    return seconds


def _recorded_runs(report: Report) -> dict[str, dict[str, float]]:
    """Return the runs of each unit in a report, by their ids, each with its seconds."""
    seconds_of_run: dict[str, float] = {}
    for run in report.runs:
        seconds_of_run[run["id"]] = float(run.get("seconds") or 0.0)
    runs = {}
    for row in report.rows:
        unit = f"{row.place}[{row.cell}]"
        runs[unit] = {run: seconds_of_run.get(run, 0.0) for run in row.runs}
    return runs


@dataclass(frozen=True)
class _Division:
    """The units of each shard, and the seconds that the longest shard takes."""

    longest: float
    shards: list[list[str]]


@dataclass(frozen=True, order=True)
class _Option:
    """A shard in which a unit can be placed; the least is the best.

    Attributes:
        weighted_end: When the shard would end, in seconds, with what the unit adds counted more
            than once.
        units: How many units the shard has: among shards that are alike the one with the fewest.
        number: The number of the shard, from 0.
        added: The seconds that the unit adds.
    """

    weighted_end: float
    units: int
    number: int
    added: float


def _place(order: Sequence[str], seconds: SecondsOfRuns, count: int, weight: int) -> _Division:
    """Place units one after the other, each in the shard that ends earliest with it.

    Args:
        order: The units.
        seconds: The runs of each unit, each with its seconds; a run of several units counts once in
            a shard.
        count: The number of shards.
        weight: How much the seconds that a unit adds to a shard count, beside the time at which the
            shard would end.
    """
    shards: list[list[str]] = [[] for _ in range(count)]
    runs_of_shard: list[set[str]] = [set() for _ in range(count)]
    ends = [0.0] * count
    for unit in order:
        options = []
        for number in range(count):
            added = 0.0
            for run, duration in seconds[unit].items():
                if run not in runs_of_shard[number]:
                    added += duration
            weighted_end = ends[number] + (1 + weight) * added
            options.append(_Option(weighted_end, len(shards[number]), number, added))
        best = min(options)
        shards[best.number].append(unit)
        runs_of_shard[best.number].update(seconds[unit])
        ends[best.number] += best.added
    return _Division(max(ends), [sorted(units) for units in shards])
