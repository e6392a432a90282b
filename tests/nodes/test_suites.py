"""Suites over two node agents of this machine: verdicts as on one node, findings that name rank and node."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.plugin.conftest import RunPytest

from pytest_distcompat.report.document import Report
from pytest_distcompat.spread import Hosts

if TYPE_CHECKING:
    from tests.plugin.conftest import Run

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("suites")
    shutil.copy(HERE / "suite_on_nodes.py", directory / "test_spread.py")
    return directory


def run_on(nodes: int, run_pytest: RunPytest, directory: Path, *args: str) -> tuple[Run, Report]:
    options = ["--distcompat-nodes", str(nodes), "--distcompat-timeout", "20", "--distcompat-report", "report.json"]
    run = run_pytest(directory, "-p", "no:cacheprovider", *options, *args)
    return run, Report.read(directory / "report.json")


def verdicts(report: Report) -> dict[tuple[str, str, str], tuple[Any, ...]]:
    return {
        (result.suite, result.cell.replace("-n2", ""), result.check): (result.status, result.reasons)
        for result in report.results
    }


def test_verdicts_equal_those_on_one_node(run_pytest: RunPytest, directory: Path) -> None:
    chosen = "TestSound and w2 or TestRaises or TestDrifts"
    _, report_of_one = run_on(1, run_pytest, directory, "-k", chosen)
    _, report_of_two = run_on(2, run_pytest, directory, "-k", chosen)
    assert len(verdicts(report_of_one)) > 30
    assert verdicts(report_of_two) == verdicts(report_of_one)
    statuses = {(result.suite, result.status.name) for result in report_of_two.results}
    assert {("TestSound", "passed"), ("TestRaises", "failed"), ("TestDrifts", "failed")} <= statuses
    assert ("TestSound", "failed") not in statuses
    messages = {(result.suite, result.check): result.message for result in report_of_two.results}
    assert messages["TestRaises", "paths"].startswith("rank 1 on n2 raised ValueError: the cause\n")
    assert messages["TestDrifts", "active"].startswith("rank 1 on n2: 1 parameters differ from rank 0 on n1's")
    # A run on one rank is on one node.
    runs = {(run["name"], run["cell"]): run["world_size"] for run in report_of_two.runs}
    assert runs["train", "fsdp2-fp32-w2-n2"] == 2


def test_a_hang_names_the_node_of_each_rank(run_pytest: RunPytest, directory: Path) -> None:
    run, _ = run_on(2, run_pytest, directory, "-k", "TestHangs and active")
    first = run.text("TestHangs::test[ddp-fp32-w2-n2:active]").partition("\n")[0]
    # On a busy machine a rank may be too late with its record, which has the number of the collective.
    waits = (
        r"rank 0 on n1 (waits in broadcast( \(default_pg, #5\))? at \S+|is in step at \S+adopter\.py:\d+: loss = .+)"
    )
    stays = r"rank 1 on n2 is in step at test_spread\.py:\d+: time\.sleep\(600\)"
    assert re.fullmatch(f"time limit of 20 s: {waits}; {stays}", first), first


def test_names_of_nodes_in_a_finding() -> None:
    hosts = Hosts(("n1", "n1", "n2", "n2"))
    assert hosts.name_in("rank 3: 2 parameters") == "rank 3 on n2: 2 parameters"
    assert hosts.name_in("ranks 0, 1 and 3 wait") == "ranks 0, 1 on n1, rank 3 on n2 wait"
    assert hosts.name_in("ranks 0, 1 and 2 others") == "ranks 0, 1 on n1 and 2 others"
    assert hosts.name_in("rank 1 on n1, 4 ranks, rank 7") == "rank 1 on n1, 4 ranks, rank 7"
    assert Hosts().name_in("rank 1") == "rank 1"
