"""Output and logs of a trainer's ranks appear where pytest shows those of a test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.plugin.conftest import RunPytest

pytestmark = pytest.mark.spawn

DRIVER = """
import logging
import sys
from my_trainer import Mine

class Talks(Mine):
    def build(self, model):
        super().build(model)
        print(f"rank {self.world.rank} has built")
        print("all ranks alike", file=sys.stderr)
        logging.getLogger("my").warning("no licence \\u00fc \\ud800")
        logging.getLogger("my").info("in detail")
        # A trainer that configures logging itself has its way.
        logging.basicConfig(format="mine: %(message)s", level=logging.INFO)
        logging.getLogger("my").info("configured")

    def load(self, directory):
        print("the load begins")
        raise ValueError("no")
"""
SUITE = """
from pytest_distcompat import CompatSuite, Matrix

class TestTalks(CompatSuite):
    driver = "talks:Talks"
    matrix = Matrix(strategies=("ddp",), precisions=("fp32",))
"""
NAMES, OPTIMIZER, RESUME = (f"TestTalks::test[ddp-fp32-w2:{check}]" for check in ("names", "optimizer", "resume"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).with_name("adopter.py"), tmp_path / "my_trainer.py")
    (tmp_path / "talks.py").write_text(DRIVER, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    return tmp_path


def test_output_and_logs_of_ranks_are_captured(home: Path, run_pytest: RunPytest) -> None:
    run = run_pytest(home, "-rP", "--log-level=INFO", "--distcompat-gpus=0", "-k", "names or optimizer or resume")
    assert run.outcomes == {NAMES: "passed", OPTIMIZER: "passed", RESUME: "failed"}, run.out
    shown = run.sections(NAMES)
    assert shown["Captured stdout of train (rank 0)"] == "rank 0 has built\n"
    assert shown["Captured stdout of train (rank 1)"] == "rank 1 has built\n"
    assert shown["Captured stderr of train (ranks 0 and 1)"] == "all ranks alike\nmine: configured\n"
    assert [line.split(maxsplit=2)[::2] for line in shown["Captured log of train (ranks 0 and 1)"].splitlines()] == [
        ["WARNING", "no licence \u00fc \\ud800"],
        ["INFO", "in detail"],
    ]
    assert "rank 1 has built" in run.out, "pytest shows it with -rP"
    # The run is shared, and the item that needed it first has its output.
    assert run.sections(OPTIMIZER) == {}
    # A failure has that of the run that ended early, whichever item needed it first.
    assert run.sections(RESUME)["Captured stdout of resume (rank 1)"] == "rank 1 has built\nthe load begins\n"
    assert not any("train" in title for title in run.sections(RESUME))


@pytest.mark.nightly
def test_without_capture_output_of_ranks_is_printed(home: Path, run_pytest: RunPytest) -> None:
    run = run_pytest(home, "-s", "--distcompat-gpus=0", "-k", "names or optimizer")
    pytest.LineMatcher(run.out.splitlines()).fnmatch_lines(
        [
            "Captured stdout of train (rank 0):",
            "rank 0 has built",
            "Captured log of train (ranks 0 and 1):",
            "WARNING  my:talks.py:* no licence *",
            "Captured stdout of train (rank 1):",
        ]
    )
    assert run.out.count("rank 0 has built") == 1
    assert run.sections(NAMES) == {}
