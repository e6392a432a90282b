"""Shards divide a session by its runs: about equal durations, nothing twice, nothing left out, on every machine alike."""

from __future__ import annotations

import random

from pytest_distcompat.plugin.shard import divide
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.result import Row

UNITS = {f"t.py::TestMine[cell-{n}]": 10.0 for n in range(24)} | {"test_a.py": 0.3, "test_b.py": 2.0}


def report(runs: dict[str, dict[str, float]]) -> Report:
    """A report in which each cell of the suite needed these runs, with their seconds."""
    rows = [Row("TestMine", "mine", cell, "t.py::TestMine", runs=list(needed)) for cell, needed in runs.items()]
    return Report(
        rows=rows, runs=[{"id": name, "seconds": s} for needed in runs.values() for name, s in needed.items()]
    )


def test_each_unit_is_in_one_shard_in_whatever_order_it_was_collected() -> None:
    plan = divide(UNITS, None, 4)
    assert sorted(unit for shard in plan for unit in shard) == sorted(UNITS)
    shuffled = list(UNITS)
    random.Random(1).shuffle(shuffled)
    assert divide({unit: UNITS[unit] for unit in shuffled}, None, 4) == plan
    assert sorted(len([unit for unit in shard if "cell" in unit]) for shard in plan) == [6, 6, 6, 6]


def test_the_last_report_makes_shards_of_equal_duration() -> None:
    seconds = {f"cell-{n}": float(1 + n * n) for n in range(24)}
    last = report({cell: {cell: second} for cell, second in seconds.items()})
    plan = divide({unit: 10.0 for unit in UNITS if "cell" in unit}, last, 4)
    took = [sum(seconds[unit.partition("[")[2][:-1]] for unit in shard) for shard in plan]
    assert max(took) < 1.02 * sum(took) / 4
    # By their number alone, one would take far longer.
    alike = divide({unit: 10.0 for unit in UNITS if "cell" in unit}, None, 4)
    assert max(sum(seconds[unit.partition("[")[2][:-1]] for unit in shard) for shard in alike) > 1.1 * sum(took) / 4


def test_cells_that_share_a_long_run_stay_together() -> None:
    shared = {name: {f"long-{name[0]}": 100.0, name: 1.0} for name in ("a1", "b1", "a2", "b2")}
    units = {f"t.py::TestMine[{name}]": 2.0 for name in shared}
    assert divide(units, report(shared), 2) == [
        ["t.py::TestMine[a1]", "t.py::TestMine[a2]"],
        ["t.py::TestMine[b1]", "t.py::TestMine[b2]"],
    ]


def test_a_run_that_all_cells_share_does_not_keep_them_together() -> None:
    shared = {f"c{n}": {"reference": 10.0, f"c{n}": 1.0} for n in range(8)}
    plan = divide({f"t.py::TestMine[{name}]": 2.0 for name in shared}, report(shared), 4)
    assert [len(units) for units in plan] == [2, 2, 2, 2]


def test_a_unit_that_the_report_lacks_takes_the_median() -> None:
    known = {f"t.py::TestMine[{name}]": 10.0 for name in ("a", "b", "c")}
    last = report({"a": {"a": 30.0}, "b": {"b": 10.0}, "c": {"c": 10.0}})
    # Its thirty tests take 30 s, as the thirty of three cells that are like most.
    plan = divide({**known, "test_new.py": 30.0}, last, 2)
    assert plan == [["t.py::TestMine[a]", "t.py::TestMine[b]"], ["t.py::TestMine[c]", "test_new.py"]]


def test_more_shards_than_units_leaves_some_empty() -> None:
    assert divide({"test_a.py": 1.0}, None, 3) == [["test_a.py"], [], []]
