"""A failure on ranks in one line: where it failed and what it says, in pytest's summary, ``--tb=line`` and JUnit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.spawn

HELPER = """
def compare(rank):
    # Where it fails is not where the test is.
    assert rank == 0, "not the first\\nand more of it"
"""

TESTS = """
import os, signal
import pytest
from helper import compare

@pytest.fixture
def broken(rank):
    compare(rank)

@pytest.mark.distcompat(world_size=2)
def test_compares(process_group, rank):
    compare(rank)

@pytest.mark.distcompat(world_size=2)
def test_setup(process_group, broken): pass

@pytest.mark.distcompat(world_size=2)
def test_is_killed(process_group, rank):
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    process_group.barrier().wait()
"""

EXPECTED = {
    "test_compares": "rank 1 failed: AssertionError: not the first",
    "test_setup": "rank 1 failed in setup: AssertionError: not the first",
    "test_is_killed": "rank 1 was killed by SIGKILL*",
}


def lines(text: str, beginning: str) -> list[str]:
    return [line.removeprefix(beginning) for line in text.splitlines() if line.startswith(beginning)]


def run(command: list[str], directory: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """As on a server: where ``CI`` is set pytest cuts nothing, and of a text that has no line in short it repeats all."""
    environment = {**environment, "CI": "true"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text(HELPER, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "conftest.py").write_text("", encoding="utf-8")
    return tmp_path


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.nightly)])
def test_our_ranks(directory: Path, environment: dict[str, str], workers: str) -> None:
    options = ["-n", workers, "--tb=line", "--junitxml=junit.xml", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options]
    done = run(command, directory, environment)
    assert done.returncode == 1, done.stdout + done.stderr
    summary = done.stdout.partition("short test summary info")[2].splitlines()[1:-1]
    pytest.LineMatcher(sorted(summary)).fnmatch_lines(
        [f"FAILED test_it.py::{name} - {EXPECTED[name]}" for name in sorted(EXPECTED)], consecutive=True
    )
    places = {
        **dict.fromkeys(("test_compares", "test_setup"), f"{directory / 'helper.py'}:4"),
        # A rank that dies says nothing of where.
        "test_is_killed": f"test_it.py:{TESTS.splitlines().index('def test_is_killed(process_group, rank):')}",
    }
    for name, place in places.items():
        pytest.LineMatcher(done.stdout.splitlines()).fnmatch_lines([f"{place}: {EXPECTED[name]}"])
    failures = {
        case.get("name", ""): case.find("failure") for case in ET.parse(directory / "junit.xml").iter("testcase")
    }
    for name, expected in EXPECTED.items():
        failure = failures[name]
        assert failure is not None
        pytest.LineMatcher([failure.get("message", "")]).fnmatch_lines([expected])
        assert "\n" not in failure.get("message", "")
        assert f"reproduce: pytest test_it.py::{name}" in (failure.text or ""), "the whole story is there"


@pytest.mark.nightly
def test_ranks_of_torchrun(directory: Path, environment: dict[str, str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pytest"]
    command = [*launch, "--tb=line", "-p", "no:cacheprovider", "-k", "compares"]
    done = run(command, directory, environment)
    assert lines(done.stdout, "FAILED test_it.py::test_compares - ") == [EXPECTED["test_compares"]], done.stdout
    assert lines(done.stdout, f"{directory / 'helper.py'}:4: ") == [EXPECTED["test_compares"]], done.stdout
