"""Suites on real ranks: an adopter's own trainer, and the built-in suite from somewhere else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.plugin.conftest import recorded
from tests.pytest_runs import RECORDED

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import DRIVERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.plugin.conftest import ApplicableChecks, Run, RunPytest, Runs

pytestmark = pytest.mark.spawn

SUITES = """
from pytest_distcompat import CompatSuite, Matrix

class TestMine(CompatSuite):
    driver = "my_trainer:Mine"
    matrix = Matrix(strategies=("ddp", "fsdp2", "zero3"), precisions=("fp32",))

class TestForgetful(CompatSuite):
    driver = "my_trainer:Forgetful"
    matrix = Matrix(strategies=("ddp",), precisions=("fp32",))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adopter's project."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(Path(__file__).with_name("adopter.py"), home / "my_trainer.py")
    (home / "test_compat.py").write_text(SUITES, encoding="utf-8")
    return home


@pytest.fixture(scope="module")
def run(home: Path, run_pytest: RunPytest) -> Run:
    return run_pytest(home, "--distcompat-report=alone.json")


def verdicts(path: Path) -> tuple[dict[str, str], int]:
    data = json.loads(path.read_text(encoding="utf-8"))
    return {result["nodeid"]: result["status"] for result in data["results"]}, data["session"]["runs"]


def test_an_adopters_trainer_passes_and_its_defect_does_not(run: Run, applicable_checks: ApplicableChecks) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED
    # A driver that has the five methods and claims nothing more.
    passed = [("TestMine", "ddp"), ("TestMine", "fsdp2"), ("TestForgetful", "ddp")]
    expected = {
        **{
            f"{suite}::test[{strategy}-fp32-w2:{check}]": "passed"
            for suite, strategy in passed
            for check in applicable_checks(Driver, f"{strategy}-fp32-w2")
        },
        f"TestMine::test[zero3-fp32-w2:{CHECKS.names()[0]}]": "skipped",
        **{f"TestForgetful::test[ddp-fp32-w2:{check}]": "failed" for check in ("resume", "restarts", "paths")},
    }
    # Upstream's, and known: torch names no file.
    damaged = [name for name in expected if name.endswith("damage]")]
    expected |= dict.fromkeys(damaged, "xfailed")
    assert "parity" not in str(expected)
    assert run.outcomes == expected, run.out
    pytest.LineMatcher(run.text("TestForgetful::test[ddp-fp32-w2:resume]").splitlines()).fnmatch_lines(
        [
            "ranks 0, 1: the optimizer's state is empty after the load; * tensors were saved",
            "ddp-fp32-w2: resume: failed",
            "the claim: *",
            "reproduce: pytest 'test_compat.py::TestForgetful::test[[]ddp-fp32-w2:resume[]]'*",
            "this run alone: torchrun *--nproc-per-node 2 *",
        ]
    )


CAREFUL = """
import my_trainer

class Careful(my_trainer.Mine):
    def save(self, directory):
        if any(directory.iterdir()):
            raise FileExistsError(f"{directory}: there is a checkpoint")
        super().save(directory)

    def step(self, number):
        if number == 4:
            raise ValueError("after the checkpoint")
        return super().step(number)
"""


@pytest.mark.nightly
def test_a_run_by_hand_finds_no_checkpoint_of_the_run(
    tmp_path: Path, run_pytest: RunPytest, run_command: Callable[[str, Path], tuple[int, str]]
) -> None:
    shutil.copy(Path(__file__).with_name("adopter.py"), tmp_path / "my_trainer.py")
    (tmp_path / "careful.py").write_text(CAREFUL, encoding="utf-8")
    (tmp_path / "test_compat.py").write_text(
        SUITES.replace("my_trainer:Forgetful", "careful:Careful"), encoding="utf-8"
    )
    name = "TestForgetful::test[ddp-fp32-w2:resume]"
    run = run_pytest(tmp_path, "-k", "Forgetful and ddp-fp32-w2:resume")
    assert run.outcomes == {name: "failed"}, run.out
    assert "ValueError: after the checkpoint" in run.text(name)
    for _ in range(2):
        code, out = run_command(run.command(name, "this run alone"), tmp_path)
        assert code
        assert "ValueError: after the checkpoint" in out
        assert "FileExistsError" not in out


def test_checks_share_runs(run: Run, runs: Runs) -> None:
    needed = 2 * runs(Driver, "ddp-fp32-w2") + runs(Driver, "fsdp2-fp32-w2")
    assert f"{len(run.outcomes)} verdicts from {needed} runs" in run.out


@pytest.mark.nightly
def test_xdist_gives_the_same_verdicts_from_as_many_runs(
    run: Run, home: Path, run_pytest: RunPytest, runs: Runs
) -> None:
    run_pytest(home, "-n", "2", "-k", "not fsdp2", "--distcompat-report=workers.json")
    alone, _ = verdicts(home / "alone.json")
    expected = {name: end for name, end in alone.items() if "fsdp2" not in name}
    assert verdicts(home / "workers.json") == (expected, 2 * runs(Driver, "ddp-fp32-w2"))


@pytest.mark.nightly
def test_the_driver_is_found_where_pytest_found_it(tmp_path: Path, run_pytest: RunPytest) -> None:
    (tmp_path / "lib").mkdir()
    shutil.copy(Path(__file__).with_name("adopter.py"), tmp_path / "lib" / "my_trainer.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = lib\n", encoding="utf-8")
    (tmp_path / "test_compat.py").write_text(SUITES, encoding="utf-8")
    run = run_pytest(tmp_path, "-k", "TestMine and ddp and active")
    assert run.outcomes == {"TestMine::test[ddp-fp32-w2:active]": "passed"}


@pytest.mark.nightly
def test_a_drivers_module_may_read_the_rank_at_import(tmp_path: Path, run_pytest: RunPytest) -> None:
    """As a script of torchrun's does. Imported by the fork server it would be rank 0 everywhere."""
    adopter = Path(__file__).with_name("adopter.py").read_text(encoding="utf-8")
    (tmp_path / "my_trainer.py").write_text(
        f"{adopter}\nimport os\nRANK = int(os.environ.get('RANK', 0))\n\n"
        "class Forgetful(Mine):\n    def build(self, model):\n        assert self.world.rank == RANK\n"
        "        super().build(model)\n",
        encoding="utf-8",
    )
    (tmp_path / "test_compat.py").write_text(SUITES, encoding="utf-8")
    run = run_pytest(tmp_path, "-k", "Forgetful and active")
    assert run.outcomes == {"TestForgetful::test[ddp-fp32-w2:active]": "passed"}, run.out


@pytest.mark.parametrize(
    "chosen",
    [
        "TestTorch and fsdp1 and active",
        pytest.param("TestAccelerate and ddp and (active or evaluation or coverage)", marks=pytest.mark.nightly),
    ],
)
def test_one_rank_needs_no_second_one(tmp_path: Path, run_pytest: RunPytest, chosen: str) -> None:
    args = [
        "--pyargs",
        "pytest_distcompat.suite",
        "--distcompat-profile=smoke",
        "--distcompat-world-size=1",
        "-k",
        chosen,
    ]
    run = run_pytest(tmp_path, *args)
    assert run.code == pytest.ExitCode.OK, run.out
    assert run.outcomes
    assert set(run.outcomes.values()) <= {"passed", "xfailed"}, run.out


@pytest.mark.nightly
def test_the_built_in_suite_runs_from_anywhere(
    tmp_path: Path, run_pytest: RunPytest, applicable_checks: ApplicableChecks
) -> None:
    run = run_pytest(tmp_path, "--pyargs", "pytest_distcompat.suite", "-k", "TestTorch and ddp-fp32-w2:")
    assert run.code == pytest.ExitCode.OK, run.out
    checks = applicable_checks(DRIVERS.get("torch"), "ddp-fp32-w2")
    assert run.outcomes == {f"TestTorch::test[ddp-fp32-w2:{check}]": "passed" for check in checks} | {
        "TestTorch::test[ddp-fp32-w2:damage]": "xfailed"
    }
    assert re.search(r"^TestTorch \(driver torch\)$", run.out, re.MULTILINE)


@pytest.mark.nightly
def test_the_reproduce_command_of_the_suite_shows_the_same_failure(
    tmp_path: Path, run_pytest: RunPytest, run_command: Callable[[str, Path], tuple[int, str]]
) -> None:
    args = ["--pyargs", "pytest_distcompat.suite", "--distcompat-strategies=fsdp2", "--distcompat-timeout=0.01"]
    name = "TestTorch::test[fsdp2-fp32-w2:names]"
    run = run_pytest(tmp_path, *args, "-k", "TestTorch and fsdp2-fp32-w2:names")
    assert run.outcomes == {name: "failed"}, run.out
    assert "time limit of 0.01 s: rank" in run.text(name)
    command = run.command(name, "reproduce")
    assert (
        command
        == f"pytest --pyargs 'pytest_distcompat.suite::{name}' --distcompat-timeout=0.01 -p tests.pytest_recorder"
    )
    code, out = run_command(command, tmp_path)
    assert code == pytest.ExitCode.TESTS_FAILED
    pytest.LineMatcher(out.splitlines()).fnmatch_lines(
        ["collected 1 item", "time limit of 0.01 s: rank*", "fsdp2-fp32-w2: names: hung"]
    )


@pytest.mark.nightly
def test_below_a_directory_with_a_newline_in_its_name(tmp_path: Path, environment: dict[str, str]) -> None:
    """Where a path stands in a line of its own (a log, a request, a command), it ends that line."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from pytest_distcompat import CompatSuite, Matrix\n\n"
        "class TestTorch(CompatSuite):\n"
        "    driver = 'torch'\n"
        "    matrix = Matrix(strategies=('ddp',), precisions=('fp32',), options=({'model': 'mlp'},))\n\n"
        "@pytest.mark.distcompat(world_size=2)\n"
        "def test_marked(rank, tmp_path, shared_dir, process_group):\n"
        "    (tmp_path / 'own').touch()\n"
        "    (shared_dir / str(rank)).touch()\n"
        "    process_group.barrier().wait()\n"
        "    assert {path.name for path in shared_dir.iterdir()} == {'0', '1'}\n"
        "    assert '\\n' in str(tmp_path) and '\\n' in str(shared_dir)\n\n"
        "@pytest.mark.distcompat(world_size=2)\n"
        "def test_that_fails(rank):\n"
        "    assert rank == 0\n",
        encoding="utf-8",
    )
    base = f"--basetemp={tmp_path / 'two'}\nlines"
    result = recorded(
        tmp_path, ["-m", "pytest", *RECORDED, base, "-k", "marked or fails or names or resume"], environment
    )
    cell = "TestTorch::test[ddp-fp32-w2-model_mlp:{}]".format
    assert result.outcomes == {
        cell("names"): "passed",
        cell("resume"): "passed",
        "test_marked": "passed",
        "test_that_fails": "failed",
    }, result.out
    assert "rank 1 failed: assert 1 == 0" in result.text("test_that_fails")
