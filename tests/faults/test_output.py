"""Large, binary and failing output of ranks changes no verdict."""

from __future__ import annotations

import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.pytest_runs import temporaries

from pytest_distcompat.lease import default_directory

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults, Start
    from tests.faults.runs import Run

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]

PASSED = {
    "test_well",
    "test_much_and_pass",
    "test_banner_and_pass",
    "test_large_property",
    "test_a_result_of_a_gigabyte",
    "test_unpicklable_results",
    "test_well_after_all",
    "test_memory_of_the_parent_before",
    "test_memory_of_the_parent_after",
}
#: By test: the first line of its failure, and more of its lines.
FAILED: dict[str, tuple[str, list[str]]] = {
    "test_flood": ("rank 1 failed: ValueError: after the flood", ["consequences:"]),
    "test_much_and_fail": ("rank 1 failed: ValueError: after much", ["consequences:"]),
    "test_much_past_the_capture": ("rank 1 exited with code 3 without a report", ["last output:", "the end of much"]),
    "test_binary": ("rank 1 failed: ValueError: after binary *", ["consequences:"]),
    "test_closed": ("rank 1 failed: ValueError: after closing", ["*ValueError: after closing*", "consequences:"]),
    "test_all_closed": ("rank 1 exited with code 1 without a report", ["consequences:", "  rank 0 *"]),
    "test_streams_gone": (
        "rank 1 failed: ValueError: I/O operation on closed file",
        ["*ValueError: after closing*", "consequences:"],
    ),
    "test_no_more_files": ("rank 1 failed: ValueError: without files", ["consequences:"]),
    "test_large_exception": ("rank 1 failed: ValueError: xxx*", ["consequences:"]),
    # A limit on the size of files also cuts the rank's own report.
    "test_disk_quota": ("rank 1 exited with code 1 without a report", ["consequences:"]),
    "test_silent_disk_quota": ("rank 1 exited with code 1 without a report", ["consequences:", "  rank 0 *"]),
    "test_disk_quota_and_fail": ("rank 1 exited with code 1 without a report", ["consequences:"]),
}


@pytest.fixture(scope="module")
def run(run_faults: RunFaults) -> Run:
    return run_faults("faults_output.py", "--distcompat-timeout=60", "--junitxml=junit.xml")


def test_every_fault_of_output_has_its_verdict(run: Run) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out[-10_000:]
    assert run.outcomes == {**dict.fromkeys(PASSED, "passed"), **dict.fromkeys(FAILED, "failed")}


@pytest.mark.parametrize("name", FAILED)
def test_the_failure_of_an_output_fault_is_shown(name: str, run: Run) -> None:
    first, more = FAILED[name]
    run.shows(name, first, *more)
    assert (run.causes(name), run.consequences(name)) == ([1], {0})


def test_much_output_is_shown_in_part(run: Run) -> None:
    sections = dict(run.of("test_much_and_fail")["sections"])
    shown = sections["Captured stdout call (rank 1)"]
    assert "characters cut" in shown
    assert shown.endswith("the end of much\n")
    assert len(run.out) < 2**25


def test_a_large_result_is_cut_in_the_middle(run: Run) -> None:
    large = run.properties("test_a_result_of_a_gigabyte")["large"]
    assert large.startswith("beginxxx")
    assert large.endswith("xxxend")
    assert f"{2**30 + 8 - 2**20} characters cut" in large


def test_large_output_and_results_take_no_memory_of_the_parent(run: Run) -> None:
    # Peak memory of the process, in KiB.
    before, after = (run.properties(f"test_memory_of_the_parent_{when}")["peak"] for when in ("before", "after"))
    assert after - before < 2**15


def test_unpicklable_results_keep_their_text(run: Run) -> None:
    properties = run.properties("test_unpicklable_results")
    assert properties["plain"] == 0
    # A lock, a function, a stream and bytes come as the text that pytest writes into JUnit's file; NaN stays a number.
    assert {name for name in properties if name.startswith("odd") and "rank" not in name} == {
        f"odd {n}" for n in range(5)
    }
    assert [type(properties[f"odd {n}"]) for n in (0, 1, 2, 4)] == [str] * 4
    assert properties["odd 4"] == str(b"bytes")
    assert math.isnan(properties["odd 3"])


def test_the_report_file_is_whole(run: Run) -> None:
    cases = {case.get("name") for case in ET.parse(run.directory / "junit.xml").getroot().iter("testcase")}
    assert cases == {*PASSED, *FAILED}


def test_the_headline_is_short(run: Run) -> None:
    assert len(run.lines("test_large_exception")[0]) < 10_000


def test_no_process_file_or_lease_remains(run: Run) -> None:
    assert not run.leftovers_by_test
    assert not run.leftovers


# The disk is full, or read-only, for the whole session.

FULL = """
import os
from pathlib import Path
import pytest

pytestmark = pytest.mark.distcompat(world_size=2)

def test_first(rank):
    pass

def test_fills_the_disk(rank, shared_dir, process_group):
    from torch import distributed
    if rank == 1:
        with (shared_dir / "large").open("wb", buffering=0) as file:
            for _ in range(2**12):
                file.write(bytes(2**16))
    distributed.barrier()

@pytest.mark.parametrize("number", range(2))
def test_on_a_full_disk(rank, process_group, number):
    raise ValueError("x" * 2**20 if rank else "rank 0")
"""
WELL = """
import pytest

@pytest.mark.distcompat(world_size=2)
def test_well(process_group, shared_dir):
    from torch import distributed
    distributed.barrier()
"""


@pytest.fixture
def mounts() -> None:
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount anything")


@pytest.mark.nightly
def test_a_full_disk(start: Start, mounts: None) -> None:
    mount = ["sh", "-c", 'mkdir small && mount -t tmpfs -o size=16m none small && exec "$@"', "sh"]
    run = start(FULL, "--basetemp", "small/base", "--distcompat-timeout=30", wrap=mount).finish()
    assert "INTERNALERROR" not in run.out
    assert run.outcome("test_first") == "passed"
    run.shows("test_fills_the_disk", "rank 1 failed: OSError: [[]Errno 28[]] No space left on device", "consequences:")
    assert {run.outcome(f"test_on_a_full_disk[{number}]") for number in range(2)} == {"failed"}
    for number in range(2):
        # There is no room for the run's own files: the failure is pytest's.
        assert run.lines(f"test_on_a_full_disk[{number}]")[0] == "OSError: [Errno 28] No space left on device"
    assert (run.causes("test_fills_the_disk"), run.consequences("test_fills_the_disk")) == ([1], {0})
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert not run.leftovers


SUITE = """
from tests.plugin.adopter import Mine  # noqa: F401 - the driver
from pytest_distcompat import CompatSuite, Matrix

class TestMine(CompatSuite):
    driver = "tests.plugin.adopter:Mine"
    matrix = Matrix(strategies=("fsdp2",), precisions=("fp32",), world_sizes=(2,))
"""


@pytest.mark.parametrize(
    ("size", "first"), [(120, "rank * exited with code 1 without a report during *"), (8, "OSError")]
)
def test_a_suite_on_a_full_disk(start: Start, mounts: None, size: int, first: str) -> None:
    """The first line names the disk, be it full before the launcher has started or when ranks write."""
    mount = [
        "sh",
        "-c",
        f'mkdir small && mount -t tmpfs -o size={size}k none small && TMPDIR=$PWD/small exec "$@"',
        "sh",
    ]
    run = start(SUITE, "--basetemp", "small/base", "--distcompat-timeout=30", "-k", "names", wrap=mount).finish()
    assert "INTERNALERROR" not in run.out
    assert run.code == pytest.ExitCode.TESTS_FAILED
    run.shows("TestMine::test[fsdp2-fp32-w2:names]", f"{first}: [[]Errno 28[]] No space left on device*")
    assert not run.leftovers


@pytest.mark.parametrize("size", [120, 8])
def test_a_trace_on_a_full_disk(mounts: None, size: int, tmp_path: Path) -> None:
    """It names the disk instead of a traceback, and leaves nothing."""
    script = f'mount -t tmpfs -o size={size}k none /mnt && TMPDIR=/mnt "$@"; ls /mnt'
    command = [sys.executable, "-m", "pytest_distcompat.cli", "trace", "torch", "fsdp2-fp32-w2", "--check", "names"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command], capture_output=True, text=True, check=False
    )
    assert "No space left on device" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert {name.partition("-leases-")[0] for name in done.stdout.splitlines()[-2:]} <= {
        "distcompat",
        "torchinductor_root",
    }


@pytest.mark.nightly
def test_a_read_only_temporary_directory(start: Start, mounts: None, tmp_path: Path) -> None:
    # Python then takes another temporary directory.
    mount = ["sh", "-c", 'mount -t tmpfs -o ro none temporary && exec "$@"', "sh"]
    run = start(WELL, wrap=mount, TEMP=str(tmp_path)).finish()
    assert run.outcomes == {"test_well": "passed"}, run.out
    assert not run.leftovers
    assert temporaries(tmp_path) == {default_directory().name}


def test_a_read_only_base(start: Start, mounts: None) -> None:
    mount = ["sh", "-c", 'mkdir small && mount -t tmpfs -o ro none small && exec "$@"', "sh"]
    run = start(WELL, "--basetemp", "small/base", wrap=mount).finish()
    assert run.outcomes == {"test_well": "failed"}, run.out
    assert "Read-only file system" in "\n".join(run.lines("test_well"))
    pytest.LineMatcher(run.lines("test_well")).fnmatch_lines(["E *OSError: [[]Errno 30[]] Read-only file system: *"])
    assert not run.leftovers
