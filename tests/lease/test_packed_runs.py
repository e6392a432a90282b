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
#: Where the cache has how long each test took.
SECONDS = ".pytest_cache/v/distcompat/seconds"
REVERSED = "def pytest_collection_modifyitems(items):\n    items.reverse()\n"


def spans(directory: Path) -> list[Span]:
    return read_timeline(directory / "base" / "distcompat")


def names(run_spans: list[Span]) -> list[str]:
    return [name_of(span.who) for span in run_spans]


def name_of(nodeid: str) -> str:
    """Return the last part of a node id."""
    return nodeid.rpartition("::")[2]


def cached_seconds(directory: Path) -> dict[str, float]:
    """Return how long each test took, by name, as the cache has it."""
    text = (directory / SECONDS).read_text(encoding="utf-8")
    return {name_of(nodeid): seconds for nodeid, seconds in json.loads(text).items()}


def make(pytester: pytest.Pytester, sizes: list[int], ordinary: int = 0) -> list[str]:
    """Write tests of these world sizes, and return their names."""
    text = MARKED.format(sizes=sizes)
    if ordinary:
        text += ORDINARY.format(ordinary=ordinary)
    pytester.makepyfile(test_made=text)
    return [f"test[{number}-w{size}]" for number, size in enumerate(sizes)]


def test_forty_tests_begin_as_planned_and_share_no_gpu(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    chance = random.Random(0)
    sizes = [chance.choice((1, 2, 4)) for _ in range(40)]
    tests = make(pytester, sizes, ordinary=10)
    script = {}
    for name in tests:
        script[name] = {"seconds": chance.uniform(0.01, 0.1)}
    result = run_on_gpus("-n", "4", "-v", script=script)
    result.assert_outcomes(passed=50)
    result.stdout.fnmatch_lines(["scheduling tests via PackedScheduling"])
    runs = spans(pytester.path)
    assert len(runs) == 40
    assert sorted(names(runs)) == sorted(tests)
    for run, other in itertools.combinations(runs, 2):
        if not set(run.ids).isdisjoint(other.ids):
            assert run.released <= other.got or other.released <= run.got
    # What each worker begins with is what was planned to be first.
    demands = [Demand(name, size) for name, size in zip(tests, sizes, strict=True)]
    order = [demand.id for demand in pack(demands, 8, 4)]
    first: dict[str, str] = {}
    for span, name in zip(runs, names(runs), strict=True):
        first.setdefault(span.worker, name)
    assert sorted(first) == ["gw0", "gw1", "gw2", "gw3"]
    assert sorted(first.values()) == sorted(order[:4])
    seconds_by_name = cached_seconds(pytester.path)
    assert seconds_by_name.keys() == set(tests)
    for name, seconds in seconds_by_name.items():
        assert seconds >= script[name]["seconds"]


@pytest.mark.nightly
def test_the_longest_tests_of_the_last_session_run_first(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    tests = make(pytester, [8] * 5)
    demands = []
    durations = {"test_gone.py::test": 9.0}
    for number, name in enumerate(tests):
        seconds = float(number)
        demands.append(Demand(name, 8, seconds))
        durations[f"test_made.py::{name}"] = seconds
    cache = pytester.path / SECONDS
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps(durations), encoding="utf-8")
    result = run_on_gpus("-n", "1", "-v")
    result.stdout.fnmatch_lines(["scheduling tests via PackedScheduling"])
    planned = [demand.id for demand in pack(demands, 8, 1)]
    assert planned != tests
    assert names(spans(pytester.path)) == planned
    after = cached_seconds(pytester.path)
    assert after["test"] == 9.0
    # The first one was said to take no time.
    for demand in demands[1:]:
        assert after[demand.id] < demand.expected()


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
    first, second, third = tests
    if how == "conftest":
        pytester.makeconftest(REVERSED)
        result = run_on_gpus("-n", "1", "-v")
        expected = [third, second, first]
    else:
        failed = {f"test_made.py::{name}": True for name in (second, third)}
        cache = pytester.path / ".pytest_cache/v/cache/lastfailed"
        cache.parent.mkdir(parents=True)
        cache.write_text(json.dumps(failed), encoding="utf-8")
        result = run_on_gpus("-n", "1", "-v", "--failed-first")
        expected = [second, third, first]
    result.assert_outcomes(passed=3)
    assert names(spans(pytester.path)) == expected


@pytest.mark.nightly
def test_without_xdist_nothing_is_reordered_and_durations_are_stored(
    pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    tests = make(pytester, [1, 4, 2])
    result = run_on_gpus("-v")
    result.assert_outcomes(passed=3)
    assert names(spans(pytester.path)) == tests
    assert set(cached_seconds(pytester.path)) == set(tests)


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
    assert set(cached_seconds(pytester.path)) == set(tests)


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
    worker_by_cell: dict[str, str] = {}
    for span in spans(pytester.path):
        item = span.who.rpartition("[")[2]
        cell, _, _ = item.partition(":")
        worker = worker_by_cell.setdefault(cell, span.worker)
        assert span.worker == worker, "one worker has all checks of a cell"
    assert set(worker_by_cell) == {"ddp-fp32-w2", "ddp-fp32-w4", "fsdp2-fp32-w2", "fsdp2-fp32-w4"}
    assert sorted(cached_seconds(pytester.path)) == [
        "TestX[ddp-fp32-w2]",
        "TestX[ddp-fp32-w4]",
        "TestX[fsdp2-fp32-w2]",
        "TestX[fsdp2-fp32-w4]",
    ]


@pytest.mark.nightly
def test_the_json_report_has_the_timeline(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    make(pytester, [1, 2])
    run_on_gpus("-n", "1")
    begin = spans(pytester.path)[0].asked
    rows: list[dict[str, Any]] = entries(pytester.path / "base" / "distcompat", begin)
    assert json.loads(json.dumps(rows)) == rows
    devices = [(row["who"], row["device"]) for row in rows]
    assert devices == [
        ("test_made.py::test[1-w2]", "GPU-0"),
        ("test_made.py::test[1-w2]", "GPU-1"),
        ("test_made.py::test[0-w1]", "GPU-0"),
    ]
    for row in rows:
        assert row["worker"] == "gw0"
        assert row["leak"] == 0
    first, _, last = rows
    assert 0 <= first["begin"] <= first["end"] <= last["begin"] <= last["end"]
    assert entries(pytester.path / "nowhere", 0.0) == []
