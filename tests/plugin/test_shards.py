"""``--distcompat-shard``: all shards together run every test once."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import FakeRanks

DRIVER = """
from pytest_distcompat import Driver

class Mine(Driver):
    name = "mine"

    @classmethod
    def unsupported_reason(cls, cell, device="cpu"):
        return "accelerate is not installed" if cell.strategy in {unsupported} else None
"""
SUITE = """
from pytest_distcompat import CompatSuite, Matrix

class TestMine(CompatSuite):
    driver = "my_driver:Mine"
    matrix = Matrix(strategies=("ddp", "fsdp1", "fsdp2", "zero3"), precisions=("fp32",))
"""
MARKED = """
import pytest

@pytest.mark.distcompat
def test_one(): pass

@pytest.mark.distcompat(reuse="module", strategies=["ddp", "fsdp2"])
def test_cells(cell): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, ranks: FakeRanks) -> pytest.Pytester:
    """A suite none of whose cells can run, two modules of marked tests and one of ordinary ones."""
    pytester.makepyfile(
        my_driver=DRIVER.format(unsupported="{'ddp', 'fsdp1', 'fsdp2', 'zero3'}"),
        test_suite=SUITE,
        test_a=MARKED,
        test_b=MARKED,
        test_ordinary="def test_one(): pass\ndef test_two(): pass",
    )
    pytester.syspathinsert()
    return pytester


def shard(project: pytest.Pytester, text: str, *args: str) -> tuple[Any, list[str]]:
    """The result of one shard, and the node ids of what ran."""
    result = project.inline_run(f"--distcompat-shard={text}", "--distcompat-report=r.json", *args)
    return result, list(dict.fromkeys(report.nodeid for report in result.getreports("pytest_runtest_logreport")))


def test_all_shards_together_run_every_test_once(project: pytest.Pytester) -> None:
    unsharded = {report.nodeid for report in project.inline_run().getreports("pytest_runtest_logreport")}
    ran = [shard(project, f"{n}/3")[1] for n in (1, 2, 3)]
    assert Counter(nodeid for names in ran for nodeid in names) == Counter(unsharded)
    assert all(ran)
    # A module's tests, and a cell's, are in one shard.
    places = [{nodeid.partition("::test_")[0].partition(":active")[0] for nodeid in names} for names in ran]
    assert sum(map(len, places)) == len(set.union(*places)) == 7


def test_what_another_shard_runs_is_deselected(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--distcompat-shard=1/3", "--distcompat-nothing-ran=pass")
    outcomes = result.parseoutcomes()
    unsharded = project.runpytest_inprocess("--distcompat-nothing-ran=pass").parseoutcomes()
    assert outcomes["deselected"] == sum(unsharded.values()) - sum(outcomes.values()) + outcomes["deselected"] > 0
    result.stdout.fnmatch_lines(["distcompat: *shard 1/3 (from option)*", "shard 1/3: * selected, 0 ran, *"])


def test_a_keyword_selects_before_the_tests_are_divided(project: pytest.Pytester) -> None:
    ran = [shard(project, f"{n}/2", "-k", "test_cells")[1] for n in (1, 2)]
    assert [len(names) for names in ran] == [2, 2]


def test_an_empty_shard_is_green_and_has_a_report(project: pytest.Pytester) -> None:
    result, ran = shard(project, "2/2", "-k", "ordinary")
    assert (result.ret, ran) == (pytest.ExitCode.OK, [])
    data = json.loads((project.path / "r.json").read_text(encoding="utf-8"))
    assert data["session"]["shard"] == {"number": 2, "plan": [["test_ordinary.py"], []]}
    assert data["session"]["settings"]["shard"]["value"] == "2/2"
    # Nothing matches in any shard: pytest's own exit code.
    assert shard(project, "2/2", "-k", "no_such_test")[0].ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize(
    ("unsupported", "codes"),
    [
        # No cell can run anywhere.
        ("{'ddp', 'zero3'}", [pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.TESTS_FAILED]),
        # The first shard has the other cell, which fails on these ranks.
        pytest.param("{'ddp'}", [pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK], marks=pytest.mark.nightly),
    ],
)
def test_a_shard_none_of_whose_cells_can_run_is_green_if_those_of_another_can(
    project: pytest.Pytester, unsupported: str, codes: list[int]
) -> None:
    project.makepyfile(my_driver=DRIVER.format(unsupported=unsupported))
    only = ("test_suite.py", "--distcompat-strategies=ddp,zero3")
    results = [project.runpytest_inprocess(f"--distcompat-shard={n}/2", *only) for n in (1, 2)]
    assert [result.ret for result in results] == codes
    assert results[1].parseoutcomes()["skipped"] == 1
    for result in results:
        # A command to run an item again has no shard, which might leave that item out.
        result.stdout.no_fnmatch_line("*reproduce:*--distcompat-shard*")
