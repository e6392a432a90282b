"""Shards divide a session by its runs: about equal durations, nothing twice, nothing left out, on every machine alike."""

from __future__ import annotations

import itertools
import random

from pytest_distcompat.plugin.shard import divide
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row

UNITS = {f"t.py::TestMine[cell-{n}]": 10.0 for n in range(24)} | {"test_a.py": 0.3, "test_b.py": 2.0}


def report(runs: dict[str, dict[str, float]]) -> Report:
    """A report in which each cell of the suite needed these runs, with their seconds."""
    rows = []
    runs_with_seconds = []
    for cell, needed in runs.items():
        rows.append(Row("TestMine", "mine", cell, "t.py::TestMine", runs=list(needed)))
        for name, seconds in needed.items():
            runs_with_seconds.append({"id": name, "seconds": seconds})
    return Report(rows=rows, runs=runs_with_seconds)


def units_of_cells() -> dict[str, float]:
    """The units of the suite, without the modules that are no cells."""
    return {unit: seconds for unit, seconds in UNITS.items() if "cell" in unit}


def cell_of(unit: str) -> str:
    """The name in brackets of ``t.py::TestMine[name]``."""
    return unit.partition("[")[2][:-1]


def shard_seconds(plan: list[list[str]], seconds: dict[str, float]) -> list[float]:
    """How long each shard takes, from the seconds of each cell."""
    totals = []
    for shard in plan:
        totals.append(sum(seconds[cell_of(unit)] for unit in shard))
    return totals


def test_each_unit_is_in_one_shard_in_whatever_order_it_was_collected() -> None:
    plan = divide(UNITS, None, 4)
    assert sorted(itertools.chain(*plan)) == sorted(UNITS)
    shuffled = list(UNITS)
    random.Random(1).shuffle(shuffled)
    assert divide({unit: UNITS[unit] for unit in shuffled}, None, 4) == plan
    assert len(plan) == 4
    for shard in plan:
        cells = [unit for unit in shard if "cell" in unit]
        assert len(cells) == 6


def test_the_last_report_makes_shards_of_equal_duration() -> None:
    seconds = {f"cell-{n}": float(1 + n * n) for n in range(24)}
    last = report({cell: {cell: second} for cell, second in seconds.items()})
    plan = divide(units_of_cells(), last, 4)
    by_report = shard_seconds(plan, seconds)
    mean = sum(by_report) / 4
    assert max(by_report) < 1.02 * mean
    # By their number alone, one would take far longer.
    plan_by_number = divide(units_of_cells(), None, 4)
    assert max(shard_seconds(plan_by_number, seconds)) > 1.1 * mean


def test_cells_that_share_a_long_run_stay_together() -> None:
    shared = {}
    for name in ("a1", "b1", "a2", "b2"):
        long_run = f"long-{name[0]}"
        shared[name] = {long_run: 100.0, name: 1.0}
    units = {f"t.py::TestMine[{name}]": 2.0 for name in shared}
    assert divide(units, report(shared), 2) == [
        ["t.py::TestMine[a1]", "t.py::TestMine[a2]"],
        ["t.py::TestMine[b1]", "t.py::TestMine[b2]"],
    ]


def test_a_run_that_all_cells_share_does_not_keep_them_together() -> None:
    shared = {f"c{n}": {"reference": 10.0, f"c{n}": 1.0} for n in range(8)}
    units = {f"t.py::TestMine[{name}]": 2.0 for name in shared}
    plan = divide(units, report(shared), 4)
    assert [len(units) for units in plan] == [2, 2, 2, 2]


def test_a_unit_that_the_report_lacks_takes_the_median() -> None:
    known = {f"t.py::TestMine[{name}]": 10.0 for name in ("a", "b", "c")}
    seconds = {"a": 30.0, "b": 10.0, "c": 10.0}
    last = report({cell: {cell: second} for cell, second in seconds.items()})
    # Its thirty tests take 30 s, as the thirty of three cells that are like most.
    plan = divide({**known, "test_new.py": 30.0}, last, 2)
    assert plan == [
        ["t.py::TestMine[a]", "t.py::TestMine[b]"],
        ["t.py::TestMine[c]", "test_new.py"],
    ]


def test_more_shards_than_units_leaves_some_empty() -> None:
    assert divide({"test_a.py": 1.0}, None, 3) == [["test_a.py"], [], []]
