"""``--distcompat-reach``: the map of a session, from ranks made by hand and from real ones."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cli.main import main
from pytest_distcompat.ext.reach import collect
from pytest_distcompat.ext.reach.branches import Executed, SourceFile
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.rank_files import reach_file
from pytest_distcompat.ext.reach.store import read_map, write_map

if TYPE_CHECKING:
    from tests.plugin.conftest import FakeRanks, RunPytest

    from pytest_distcompat.launch.forensics.ending import Ending
    from pytest_distcompat.launch.request import Request

SUITE = """
from pytest_distcompat import CompatSuite, Matrix

class TestX(CompatSuite):
    driver = "accelerate"
    matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("fp32",))
"""
FAILS = """
from pytest_distcompat.drivers import DRIVERS

class Fails(DRIVERS.get("accelerate")):
    def build(self, model):
        super().build(model)
        raise RuntimeError("it does not build")
"""
LIBRARY = "def f(a):\n    if a:\n        return 1\n    return 2\n"
FILE = FileId("lib", "library.py")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only installed library."""
    path = tmp_path / "library.py"
    path.write_text(LIBRARY, encoding="utf-8")
    monkeypatch.setattr(collect, "installed_files", lambda: {path: FILE})
    monkeypatch.setattr(collect, "installed_versions", lambda: {"lib": "1.0"})
    return path


def reached(path: Path) -> dict[str, set[Context]]:
    """The contexts of each branch of the library."""
    reach_map = read_map(path).coverage_of(FILE)
    return {branch.branch.arrow: set(branch.contexts) for branch in reach_map.branches()}


@pytest.mark.usefixtures("library")
def test_the_map_of_a_session_is_written_from_the_files_of_its_ranks(
    pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    def answer(request: Request) -> Ending:
        payload: dict[str, Any] = dict(request.payload)
        assert payload["asking_cell"] == payload["cell"]
        assert payload["recorders"] == ("pytest_distcompat.ext.reach.tracer:rank_tracer",)
        taken = [2, 3] if payload["cell"].startswith("ddp") else [2, 4]
        data = {"driver": payload["driver"], "cell": payload["asking_cell"], "files": [["lib", "library.py"]]}
        data["actions"] = {"save": {"0": taken}}
        reach_file(Path(request.directory), 0).write_text(json.dumps(data), encoding="utf-8")
        return ranks.well(request.world_size)

    ranks.answer = answer
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("--distcompat-reach=r.sqlite", "-k", "names")
    result.stdout.fnmatch_lines(
        [
            "reach: 2 of 2 branches (100.0 %) are executed by 2 cells of 1 driver",
            "reach: r.sqlite, shown by: distcompat reach r.sqlite",
        ]
    )
    assert reached(pytester.path / "r.sqlite") == {
        "2 -> 3": {Context("accelerate", "ddp-fp32-w2", "save")},
        "2 -> 4": {Context("accelerate", "fsdp2-fp32-w2", "save")},
    }


@pytest.mark.nightly
def test_a_run_is_of_the_cell_whose_check_needs_it(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    """A reference is in a cell that nobody can select."""
    pytester.makepyfile(SUITE)
    pytester.runpytest_inprocess("--distcompat-reach=r.sqlite", "-k", "fsdp2 and parity")
    cells = {request.payload["cell"] for request in ranks.requests}
    assert len(cells) > 1
    assert {request.payload["asking_cell"] for request in ranks.requests} == {"fsdp2-fp32-w2"}


def test_a_session_without_a_suite_says_that_there_is_no_map(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test(): pass")
    result = pytester.runpytest_inprocess("--distcompat-reach=r.sqlite")
    result.stdout.fnmatch_lines(["reach: no cell of a suite ran; r.sqlite was not written"])
    assert not (pytester.path / "r.sqlite").exists()


def test_without_the_option_ranks_are_not_traced(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-k", "names")
    assert ranks.requests
    assert not any(request.payload["recorders"] for request in ranks.requests)
    result.stdout.no_fnmatch_line("reach: *")


def test_without_the_option_nothing_of_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    script = (
        "import sys, pytest\n"
        "import pytest_distcompat.worker, pytest_distcompat.runner, pytest_distcompat.plugin.reporting.results\n"
        "pytest.main(['-q', '--collect-only', '-p', 'no:cov', 'test_suite.py'])\n"
        "found = {name for name in sys.modules if name == 'coverage' or name.startswith('pytest_distcompat.ext.reach.')}\n"
        "assert found == {'pytest_distcompat.ext.reach.plugin'}, found\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("plugin", ["distcompat-reach", "distcompat"])
def test_without_its_plugin_there_is_no_option(plugin: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test(): pass")
    result = pytester.runpytest_subprocess("-p", f"no:{plugin}", "--distcompat-reach=r.sqlite")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*unrecognized arguments: --distcompat-reach=r.sqlite"])
    result = pytester.runpytest_subprocess("-p", f"no:{plugin}")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--distcompat-reach=no/r.sqlite"], "*--distcompat-reach: 'no/r.sqlite': there is no directory */no."),
        (["--distcompat-reach=."], "*--distcompat-reach: '.' is a directory; expected a file."),
        (
            ["--distcompat-reach=r", "--distcompat-simulate=4"],
            "*--distcompat-reach: a simulation executes no trainer;*",
        ),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_tests(
    arguments: list[str], message: str, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_without_coverage_the_extra_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "coverage" else find_spec(name, *rest)
    )
    result = pytester.runpytest_inprocess("--distcompat-reach=r.sqlite")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--distcompat-reach: it needs coverage: pip install 'pytest-distcompat?reach?'."])


@pytest.mark.spawn
@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n2", marks=pytest.mark.nightly)])
def test_branches_of_a_real_cell_have_its_name_and_action(tmp_path: Path, run_pytest: RunPytest, workers: str) -> None:
    """Two cells, under xdist in a worker each: accelerate wraps by FSDP2 in one of them alone."""
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    run = run_pytest(tmp_path, workers, "--distcompat-reach=r.sqlite", "-k", "names")
    assert run.code == 0, run.out
    assert "reach: r.sqlite" in run.out
    reach_map = read_map(tmp_path / "r.sqlite")
    accelerator = reach_map.coverage_of(FileId("accelerate", "accelerator.py"))
    by_name = {function.function.name: function for function in accelerator.functions()}
    ddp, fsdp2 = (f"accelerate/{strategy}-fp32-w2" for strategy in ("ddp", "fsdp2"))
    prepared = by_name["Accelerator.prepare"].contexts
    assert {(context.driver_and_cell, context.action) for context in prepared} == {(ddp, "build"), (fsdp2, "build")}
    # A branch with its way: only FSDP2 is prepared here.
    branches = by_name["Accelerator.prepare"].branches
    own = [branch for branch in branches if {context.driver_and_cell for context in branch.contexts} == {fsdp2}]
    assert "fsdp" in " ".join(branch.branch.text for branch in own)
    # Steps and saves are told apart from what is built.
    sharded = reach_map.coverage_of(FileId("torch", "distributed/fsdp/_fully_shard/_fsdp_param_group.py"))
    unshard = next(function for function in sharded.functions() if function.function.name == "FSDPParamGroup.unshard")
    assert {context.driver_and_cell for context in unshard.contexts} == {fsdp2}
    assert "step" in {context.action for context in unshard.contexts}
    assert "build" not in {context.action for context in unshard.contexts}


def write_example(path: Path, cell: str, taken: int, version: str = "1.0") -> Path:
    source = path.with_suffix(".py")
    source.write_text(LIBRARY, encoding="utf-8")
    from pytest_distcompat.ext.reach.analysis import AnalysedFile

    file: SourceFile = AnalysedFile(source, FILE).file
    reach_map = ReachMap({"lib": version}, {FILE: file})
    reach_map.add(FILE, Context("torch", cell, "save"), Executed(0b11100, taken))
    write_map(path, reach_map)
    return path


def test_the_command_shows_one_map_of_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_example(tmp_path / "1.sqlite", "ddp-fp32-w2", 0b01)
    second = write_example(tmp_path / "2.sqlite", "fsdp2-fp32-w2", 0b10)
    merged, html = tmp_path / "all.sqlite", tmp_path / "all.html"
    assert main(["reach", str(first), str(second), "-o", str(merged), "--html", str(html)]) == 0
    assert "2 of 2 branches (100.0 %) are executed by 2 cells of 1 driver" in capsys.readouterr().out
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["reach", str(merged), "--library", "lib"]) == 0
    assert "1 cell in save: torch/fsdp2-fp32-w2" in capsys.readouterr().out
    assert main(["reach", str(merged), "--missing", "--cell", "ddp-*"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "branches that no cell reaches: 1"


def test_the_command_compares_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = write_example(tmp_path / "1.sqlite", "ddp-fp32-w2", 0b11)
    later = write_example(tmp_path / "2.sqlite", "ddp-fp32-w2", 0b01, "2.0")
    assert main(["reach", str(later), "--compare", str(earlier)]) == 0
    out = capsys.readouterr().out
    assert "new branches that no cell reaches: 0" in out
    assert "branches that a cell of the earlier release reaches, and none of this one: 1" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--library", "torchh"], "--library torchh: it is not in the map. Known: lib."),
        (["--cell", "zero9-*"], "--cell zero9-*: none of the 1 cells in the map: ddp-fp32-w2."),
        (["gone.sqlite"], "gone.sqlite: there is no such file; expected one that --distcompat-reach wrote"),
    ],
)
def test_the_command_refuses_what_is_not_there(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_example(tmp_path / "1.sqlite", "ddp-fp32-w2", 0b01)
    assert main(["reach", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.spawn
def test_ranks_of_other_nodes_are_in_the_map(tmp_path: Path, run_pytest: RunPytest) -> None:
    """Each node agent writes below a directory of its own."""
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    run = run_pytest(tmp_path, "--distcompat-nodes=2", "--distcompat-reach=r.sqlite", "-k", "ddp and names")
    assert run.code == 0, run.out
    reach_map = read_map(tmp_path / "r.sqlite")
    assert {context.driver_and_cell for context in reach_map.contexts()} == {"accelerate/ddp-fp32-w2-n2"}
    accelerator = reach_map.coverage_of(FileId("accelerate", "accelerator.py"))
    assert next(
        function for function in accelerator.functions() if function.function.name == "Accelerator.prepare"
    ).contexts


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_rank_that_fails_leaves_what_it_executed(tmp_path: Path, run_pytest: RunPytest) -> None:
    (tmp_path / "my_driver.py").write_text(FAILS, encoding="utf-8")
    suite = SUITE.replace('"accelerate"', '"my_driver:Fails"')
    (tmp_path / "test_suite.py").write_text(suite, encoding="utf-8")
    run = run_pytest(tmp_path, "--distcompat-reach=r.sqlite", "-k", "ddp and names")
    assert run.code == 1, run.out
    assert "it does not build" in run.out
    reach_map = read_map(tmp_path / "r.sqlite")
    prepare = reach_map.coverage_of(FileId("accelerate", "accelerator.py")).functions()
    (contexts,) = (branch.contexts for branch in prepare if branch.function.name == "Accelerator.prepare")
    assert [(context.driver_and_cell, context.action) for context in contexts] == [
        ("my_driver:Fails/ddp-fp32-w2", "build")
    ]
