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
    seconds = {run["id"]: float(run.get("seconds") or 0.0) for run in (last.runs if last else ())}
    needed = {f"{row.place}[{row.cell}]": row.runs for row in (last.rows if last else ())}
    runs = {unit: {run: seconds.get(run, 0.0) for run in needed[unit]} for unit in sizes if unit in needed}
    known = [sum(found.values()) / sizes[unit] for unit, found in runs.items()]
    usual = statistics.median([one for one in known if one] or [1.0])
    # A unit without known runs is one run of its own.
    runs |= {unit: {f"of {unit}": usual * size} for unit, size in sizes.items() if unit not in runs}
    order = sorted(sizes, key=lambda unit: (-sum(runs[unit].values()), unit))
    return min((_place(order, runs, count, weight) for weight in (0, 1)), key=lambda placed: placed[0])[1]


def _place(
    order: Sequence[str], runs: Mapping[str, Mapping[str, float]], count: int, weight: int
) -> tuple[float, list[list[str]]]:
    """Return the duration of the longest shard, and the shards; ``weight`` is that of what a unit adds."""
    shards: list[list[str]] = [[] for _ in range(count)]
    held: list[set[str]] = [set() for _ in range(count)]
    took = [0.0] * count
    for unit in order:
        added = [sum(seconds for run, seconds in runs[unit].items() if run not in held[n]) for n in range(count)]
        best = min(range(count), key=lambda n: (took[n] + (1 + weight) * added[n], len(shards[n]), n))
        shards[best].append(unit)
        held[best].update(runs[unit])
        took[best] += added[best]
    return max(took), [sorted(units) for units in shards]
