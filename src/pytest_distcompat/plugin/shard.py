"""Shards of a session: with ``--distcompat-shard 2/3`` a machine runs part 2 of 3 of the tests.

The machines share nothing, not even files. So each of them divides all tests in the same way, by
``divide``, and runs its own part: ``suite.order.select_shard`` calls it after collection. What is
divided are *units*, whose tests stay together:

- a *cell* of a suite, as ``a.py::TestA[fsdp2-fp32-w2]``. A cell is a configuration of a trainer.
  All its checks need the same *runs*, each a process group that trains;
- a module of other tests, as ``tests/test_b.py``.

How long a unit takes is read from the report of an earlier session. There a unit has the ids of its
runs, and a run its seconds. Several cells may need one run; in a shard that has them it runs once.
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

#: The file with the division in the session's store, a directory that its processes share. The
#: process with the terminal reads it.
FILE = "shards.json"
#: The assumed duration of an ordinary test, if that of a check or of a marked test is 1.
ORDINARY = 0.01
#: A unit to its runs: the id of each to its seconds.
SecondsOfRuns = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Shard:
    """A part of a session."""

    #: Which part, from 1.
    number: int
    #: The number of parts.
    count: int


def read_shard(text: str) -> Shard | None:
    """Return the shard of a text such as ``2/3``; None for an empty text.

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

    Units are placed one after the other, the longest first. That is tried in two ways: each unit
    goes to the shard that then ends earliest, or it also counts how much the unit adds to a shard,
    which keeps units that share long runs together. The division whose longest shard is shorter
    counts.

    Args:
        sizes: Each unit to the number of tests in it; ordinary tests count as ``ORDINARY``.
        last: The report with the seconds of each unit's runs; a unit that it lacks takes the median
            for each of its tests. None for no report.
        count: The number of shards.

    Returns:
        The units of each shard, sorted.
    """
    seconds = _seconds_of_runs(sizes, last)

    def longest_first(unit: str) -> tuple[float, str]:
        # Of equally long ones by name, so that all machines have one order.
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
    """Return each unit to the runs that it needs: the id of each run to its seconds."""
    runs = _recorded_runs(last) if last is not None else {}
    # The seconds for each test, of units that the report knows.
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
    """Return each unit in a report to its runs: the id of each run to its seconds."""
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
    """All units, divided into shards."""

    #: The seconds that the longest shard takes.
    longest: float
    #: The units of each shard, sorted.
    shards: list[list[str]]


@dataclass(frozen=True, order=True)
class _Option:
    """A shard in which a unit can be placed.

    The least option is the best: they are compared by their fields in this order.

    Attributes:
        weighted_end: When the shard would end, in seconds; with a weight, what the unit adds counts
            more than once.
        units: How many units the shard has already: of equal shards the one with the fewest.
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
        order: The units, in the order in which they are placed.
        seconds: The runs of each unit; a run of several units counts once in a shard.
        count: The number of shards.
        weight: How often the seconds that a unit adds to a shard count again, beside the time at
            which the shard would end: 0 or 1.
    """
    # Of each shard: its units, the ids of its runs, and the seconds that it takes.
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
