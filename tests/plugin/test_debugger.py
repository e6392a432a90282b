"""Where a debugger works on a rank, at a terminal, and what is said where there is none."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pexpect
import pytest
from tests.plugin.conftest import FakeRanks, RunPytest

from pytest_distcompat.launch.forensics.ending import RankEnd
from pytest_distcompat.plugin.marked.phase import Phase

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


FAILING = """
import pytest
import torch

@pytest.mark.distcompat(world_size=2)
def test_fails(process_group, rank):
    found = torch.ones(1) * rank
    torch.distributed.all_reduce(found)
    assert found == 3, "on both ranks"

def test_here():
    mine = 5
    assert mine == 6
"""
FAILING_SUITE = SUITE.replace("Stops", "Fails").replace("stops", "fails")
FAILING_DRIVER = """
import torch
from my_trainer import Mine

class Fails(Mine):
    def step(self, number):
        if number == 1:
            trained = 100 + self.world.rank
            # The others wait while one is debugged: its peers are still there.
            torch.distributed.barrier()
            raise ValueError("no")
        return super().step(number)
"""


def _pytest_at_a_terminal(directory: Path, environment: dict[str, str], *args: str) -> pexpect.spawn[str]:
    line = ["-m", "pytest", "--pdb", "--distcompat-gpus=0", "-p", "no:cacheprovider", "-p", "no:randomly", *args]
    return pexpect.spawn(
        sys.executable, line, cwd=str(directory), env=environment, encoding="utf-8", timeout=120, echo=False
    )


def _leave(terminal: pexpect.spawn[str], variable: str, value: str) -> None:
    terminal.expect_exact("(Pdb) ")
    terminal.sendline(f"p {variable}")
    terminal.expect_exact(value)
    terminal.expect_exact("(Pdb) ")
    terminal.sendline("q")


@pytest.mark.nightly
def test_the_run_of_a_failed_cell_stops_in_its_rank(tmp_path: Path, environment: dict[str, str]) -> None:
    adopter = Path(__file__).with_name("adopter.py").read_text(encoding="utf-8")
    (tmp_path / "my_trainer.py").write_text(adopter, encoding="utf-8")
    (tmp_path / "fails.py").write_text(FAILING_DRIVER, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(FAILING_SUITE, encoding="utf-8")
    terminal = _pytest_at_a_terminal(tmp_path, environment, "-k", "names or optimizer")
    assert terminal.expect([r"rank (\d) stops where it fails", pexpect.EOF]) == 0, terminal.before
    assert isinstance(terminal.match, re.Match)
    _leave(terminal, "trained", f"10{terminal.match[1]}")
    # The other check failed in the same run, and stops nowhere.
    terminal.expect_exact("2 failed")
    terminal.expect(pexpect.EOF)


@pytest.mark.nightly
def test_a_marked_test_stops_in_its_rank_and_an_ordinary_one_here(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "test_it.py").write_text(FAILING, encoding="utf-8")
    terminal = _pytest_at_a_terminal(tmp_path, environment)
    assert terminal.expect([r"rank (\d) stops where it fails", pexpect.EOF]) == 0, terminal.before
    _leave(terminal, "found", "tensor([1.])")
    terminal.expect_exact("entering PDB")
    terminal.expect_exact("(Pdb) ")
    terminal.sendline("p mine")
    terminal.expect_exact("5")
    terminal.sendline("c")
    terminal.expect_exact("2 failed")
    terminal.expect(pexpect.EOF)


@pytest.mark.nightly
def test_without_a_terminal_the_command_is_given(
    tmp_path: Path, run_pytest: RunPytest, environment: dict[str, str]
) -> None:
    (tmp_path / "test_it.py").write_text(FAILING, encoding="utf-8")
    run = run_pytest(tmp_path, "--pdb", "--distcompat-gpus=0", "-k", "test_fails")
    lines = run.out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("There is no terminal here."))
    assert lines[at + 1].endswith(" --by-hand --pdb 0") or lines[at + 1].endswith(" --by-hand --pdb 1")
    command = pexpect.spawn(
        "/bin/sh", ["-c", lines[at + 1]], cwd=str(tmp_path), env=environment, encoding="utf-8", timeout=120, echo=False
    )
    _leave(command, "found", "tensor([1.])")
    command.expect(pexpect.EOF)


def test_a_run_over_several_nodes_is_not_started_again(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.distcompat(world_size=2)\ndef test(): pass")
    failed = FakeRanks.phases(call=Phase("call", "failed", "E   the cause"))
    raised = (RankEnd(1, "raised", "raised ValueError: the cause"), failed)
    ending = FakeRanks.ending((RankEnd(0, "done"), FakeRanks.phases()), raised)
    command = "torchrun --nnodes 2 --by-hand"
    ranks.answer = lambda _: dataclasses.replace(ending, command=f"{command}  # on each node")
    result = pytester.runpytest_inprocess("--pdb")
    result.stdout.fnmatch_lines(
        [
            "The run is over several nodes. In a terminal of its node, rank 1 stops where it failed with:",
            f"{command} --pdb 1  # on each node",
        ]
    )
