"""Where a debugger works on a rank, at a terminal, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pexpect
import pytest
from tests.plugin.conftest import RunPytest

pytestmark = pytest.mark.spawn

TESTS = """
import pdb
import pytest
import torch

pytestmark = pytest.mark.distcompat(world_size=2)

def test_breakpoint(process_group):
    breakpoint()

def test_set_trace(process_group):
    pdb.set_trace()
    torch.ones(1)

def test_of_one_rank(process_group):
    ranks = torch.ones(1)
    torch.distributed.all_reduce(ranks)
    torch.distributed.breakpoint(rank=1)
    assert ranks == 3
"""
DRIVER = """
import torch
from my_trainer import Mine

class Stops(Mine):
    def step(self, number):
        torch.distributed.breakpoint(rank=1)
        return super().step(number)
"""
SUITE = """
from pytest_distcompat import CompatSuite, Matrix

class TestStops(CompatSuite):
    driver = "stops:Stops"
    matrix = Matrix(strategies=("ddp",), precisions=("fp32",))
"""
WHY = "bdb.BdbQuit: the debugger was left, or found no terminal; *torchrun*"


def _at_a_terminal(command: str, directory: Path, environment: dict[str, str]) -> pexpect.spawn[str]:
    """That command line at a terminal, up to where the debugger first asks, in the frame that called it."""
    terminal = pexpect.spawn(
        "/bin/sh", ["-c", command], cwd=str(directory), env=environment, encoding="utf-8", timeout=60, echo=False
    )
    terminal.expect_exact("(Pdb) ")
    terminal.sendline("up")
    terminal.expect_exact("-> torch.distributed.breakpoint(rank=1)")
    terminal.expect_exact("(Pdb) ")
    return terminal


@pytest.mark.nightly
def test_of_marked_tests(tmp_path: Path, run_pytest: RunPytest, environment: dict[str, str]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    run = run_pytest(tmp_path, "test_it.py", "--distcompat-gpus=0", "--distcompat-timeout=30")
    assert set(run.outcomes.values()) == {"failed"}
    for name in run.outcomes:
        pytest.LineMatcher(run.text(name).splitlines()).fnmatch_lines([f"rank ? failed: {WHY}"])
    terminal = _at_a_terminal(run.command("test_of_one_rank", "this run alone"), tmp_path, environment)
    terminal.sendline("p ranks")
    terminal.expect_exact("tensor([2.])")
    terminal.sendline("c")
    # What the test says after it, and then pytest of it, is seen too.
    terminal.expect_exact("rank 1: failed: assert tensor([2.]) == 3")
    terminal.expect(pexpect.EOF)


@pytest.mark.nightly
def test_of_a_cell(tmp_path: Path, run_pytest: RunPytest, environment: dict[str, str]) -> None:
    adopter = Path(__file__).with_name("adopter.py").read_text(encoding="utf-8")
    (tmp_path / "my_trainer.py").write_text(adopter, encoding="utf-8")
    (tmp_path / "stops.py").write_text(DRIVER, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    run = run_pytest(tmp_path, "test_it.py", "--distcompat-gpus=0", "-k", "names")
    (name,) = run.outcomes
    pytest.LineMatcher(run.text(name).splitlines()).fnmatch_lines([f"*rank 1 raised {WHY}"])
    terminal = _at_a_terminal(run.command(name, "this run alone"), tmp_path, environment)
    terminal.sendline("p number")
    terminal.expect_exact("0\r")
    terminal.sendline("q")
    terminal.expect_exact("rank 1: bdb.BdbQuit: the debugger was left")
    terminal.expect(pexpect.EOF)
