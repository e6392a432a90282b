"""Sessions of pytest with xdist on 8 made-up GPUs: the order of tests, and its report."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.lease import Demand, Span, entries, pack, read_timeline

if TYPE_CHECKING:
    from tests.lease.conftest import RunOnGpus

pytest.importorskip("xdist")

MARKED = """
import pytest

def case(number, size):
    return pytest.param(number, id=f"{{number}}-w{{size}}", marks=pytest.mark.distcompat(world_size=size))

@pytest.mark.parametrize("number", [case(*pair) for pair in enumerate({sizes})])
def test(number): pass
"""
ORDINARY = """
@pytest.mark.parametrize("number", range({ordinary}))
def test_ordinary(number): pass
"""
REVERSED = "def pytest_collection_modifyitems(items):\n    items.reverse()\n"


def spans(directory: Path) -> list[Span]:
    return read_timeline(directory / "base" / "distcompat")


def names(run_spans: list[Span]) -> list[str]:
    return [span.who.rpartition("::")[2] for span in run_spans]


def make(pytester: pytest.Pytester, sizes: list[int], ordinary: int = 0) -> list[str]:
    """Tests of these world sizes; their names."""
    text = MARKED.format(sizes=sizes) + (ORDINARY.format(ordinary=ordinary) if ordinary else "")
    pytester.makepyfile(test_made=text)
    return [f"test[{number}-w{size}]" for number, size in enumerate(sizes)]


def test_forty_tests_begin_as_planned_and_share_no_gpu(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    chance = random.Random(0)
    sizes = [chance.choice((1, 2, 4)) for _ in range(40)]
    tests = make(pytester, sizes, ordinary=10)
    script = {name: {"seconds": chance.uniform(0.01, 0.1)} for name in tests}
    result = run_on_gpus("-n", "4", "-v", script=script)
    result.assert_outcomes(passed=50)
    result.stdout.fnmatch_lines(["scheduling tests via PackedScheduling"])
    runs = spans(pytester.path)
    assert len(runs) == 40
    assert sorted(names(runs)) == sorted(tests)
    for combination, other in itertools.combinations(runs, 2):
        if set(combination.ids) & set(other.ids):
            assert combination.released <= other.got or other.released <= combination.got
    # What each worker begins with is what was planned to be first.
    demands = [Demand(name, size) for name, size in zip(tests, sizes, strict=True)]
    order = [demand.id for demand in pack(demands, 8, 4)]
    first: dict[str, str] = {}
    for span, name in zip(runs, names(runs), strict=True):
        first.setdefault(span.worker, name)
    assert sorted(first) == ["gw0", "gw1", "gw2", "gw3"]
    assert sorted(first.values()) == sorted(order[:4])
    cached = json.loads((pytester.path / ".pytest_cache/v/distcompat/seconds").read_text())
    seconds_by_name = by_name(cached)
    assert seconds_by_name.keys() == set(tests)
    for name, seconds in seconds_by_name.items():
        assert seconds >= script[name]["seconds"]


def by_name(cached: dict[str, float]) -> dict[str, float]:
    return {name.rpartition("::")[2]: seconds for name, seconds in cached.items()}


@pytest.mark.nightly
def test_the_longest_tests_of_the_last_session_run_first(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    tests = make(pytester, [8] * 5)
    seconds = {name: float(number) for number, name in enumerate(tests)}
    durations = {f"test_made.py::{name}": value for name, value in seconds.items()}
    cache = pytester.path / ".pytest_cache/v/distcompat/seconds"
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps(durations | {"test_gone.py::test": 9.0}), encoding="utf-8")
    result = run_on_gpus("-n", "1", "-v")
    result.stdout.fnmatch_lines(["scheduling tests via PackedScheduling"])
    planned = [demand.id for demand in pack([Demand(name, 8, seconds[name]) for name in tests], 8, 1)]
    assert names(spans(pytester.path)) == planned != tests
    after = json.loads(cache.read_text())
    assert after.pop("test_gone.py::test") == 9.0
    assert all(after[name] < value for name, value in durations.items() if value)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("args", "scheduler"),
    [
        (["-n", "1", "-p", "no:cacheprovider"], "PackedScheduling"),
        (["-n", "1", "--dist=loadfile"], "LoadFileScheduling"),
        (["-n", "1", "--dist=loadgroup"], "LoadGroupScheduling"),
        (["-n", "1", "--dist=worksteal"], "WorkStealingScheduling"),
    ],
)
def test_the_dist_option_selects_the_scheduler(
    args: list[str], scheduler: str, pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    make(pytester, [1, 2], ordinary=2)
    result = run_on_gpus("-v", *args)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([f"scheduling tests via {scheduler}"])


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["conftest", "failed first"])
def test_the_users_order_is_kept(how: str, pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    tests = make(pytester, [4, 2, 1])
    if how == "conftest":
        pytester.makeconftest(REVERSED)
        result = run_on_gpus("-n", "1", "-v")
    else:
        failed = pytester.path / ".pytest_cache/v/cache/lastfailed"
        failed.parent.mkdir(parents=True)
        failed.write_text(json.dumps({f"test_made.py::{name}": True for name in tests[1:]}), encoding="utf-8")
        result = run_on_gpus("-n", "1", "-v", "--failed-first")
    result.assert_outcomes(passed=3)
    expected = {"conftest": list(reversed(tests)), "failed first": [tests[1], tests[2], tests[0]]}[how]
    assert names(spans(pytester.path)) == expected


@pytest.mark.nightly
def test_without_xdist_nothing_is_reordered_and_durations_are_stored(
    pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    tests = make(pytester, [1, 4, 2])
    result = run_on_gpus("-v")
    result.assert_outcomes(passed=3)
    assert names(spans(pytester.path)) == tests
    assert set(by_name(json.loads((pytester.path / ".pytest_cache/v/distcompat/seconds").read_text()))) == set(tests)


@pytest.mark.nightly
def test_durations_are_stored_although_pytest_removes_the_files_of_a_green_session(
    pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    tests = make(pytester, [1, 2])
    (pytester.path / "script.json").write_text("{}", encoding="utf-8")
    # pytester's own way to run pytest gives a --basetemp, which pytest leaves alone.
    options = ("-p", "stand_in", "-p", "no:randomly", "-o", "tmp_path_retention_policy=failed")
    result = pytester.run(sys.executable, "-m", "pytest", *options)
    result.assert_outcomes(passed=2)
    assert set(by_name(json.loads((pytester.path / ".pytest_cache/v/distcompat/seconds").read_text()))) == set(tests)


@pytest.mark.nightly
def test_the_checks_of_a_cell_are_one_demand_of_one_worker(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makepyfile(
        """
        from pytest_distcompat import CompatSuite, Matrix

        class TestX(CompatSuite):
            driver = "torch"
            matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("fp32",), world_sizes=(2, 4))
        """
    )
    # The stand-in's ranks do nothing, so no check holds; but they had GPUs for it.
    result = run_on_gpus("-n", "3", "-v")
    result.stdout.fnmatch_lines(["scheduling tests via PackedScheduling"])
    workers: dict[str, set[str]] = {}
    for span in spans(pytester.path):
        workers.setdefault(span.who.rpartition("[")[2].partition(":")[0], set()).add(span.worker)
    assert {cell: len(worker) for cell, worker in workers.items()} == dict.fromkeys(
        ["ddp-fp32-w2", "ddp-fp32-w4", "fsdp2-fp32-w2", "fsdp2-fp32-w4"], 1
    )
    cached = json.loads((pytester.path / ".pytest_cache/v/distcompat/seconds").read_text())
    assert [name.rpartition("::")[2] for name in sorted(cached)] == [f"TestX[{cell}]" for cell in sorted(workers)]


@pytest.mark.nightly
def test_the_json_report_has_the_timeline(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    make(pytester, [1, 2])
    run_on_gpus("-n", "1")
    rows: list[dict[str, Any]] = entries(pytester.path / "base" / "distcompat", spans(pytester.path)[0].asked)
    assert json.loads(json.dumps(rows)) == rows
    assert [(row["who"], row["device"], row["worker"], row["leak"]) for row in rows] == [
        ("test_made.py::test[1-w2]", "GPU-0", "gw0", 0),
        ("test_made.py::test[1-w2]", "GPU-1", "gw0", 0),
        ("test_made.py::test[0-w1]", "GPU-0", "gw0", 0),
    ]
    assert 0 <= rows[0]["begin"] <= rows[0]["end"] <= rows[2]["begin"] <= rows[2]["end"]
    assert entries(pytester.path / "nowhere", 0.0) == []
