"""Clocks that a test has frozen, in pytest's process and on the ranks: time limits hold, and who failed first is shown first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults
    from tests.faults.runs import Run

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]

#: freezegun also replaces what modules took by name from ``time``, and a fixture of the session stays while ranks are watched.
FROZEN = """
import threading, time
import pytest
from freezegun import freeze_time

mark = pytest.mark.distcompat(world_size=2)

@pytest.fixture(scope="session", autouse=True)
def frozen():
    with freeze_time("2024-01-01"):
        yield

@mark
def test_well(rank):
    pass

def test_of_the_parent():
    assert time.time() == time.time()
    assert time.monotonic() == time.monotonic()

@pytest.mark.distcompat(world_size=2, timeout=3)
def test_hangs(rank):
    assert time.monotonic() == time.monotonic()
    if rank == 1:
        threading.Event().wait()

@mark
def test_other_ranks_wait(rank, process_group):
    from torch import distributed
    if rank == 1:
        raise ValueError("before the others")
    distributed.barrier()

@mark
def test_both_fail(rank, shared_dir):
    if rank == 1:
        raise ValueError("first")
    rank_log = shared_dir.parent / "rank-1.jsonl"
    while not rank_log.exists() or '"error"' not in rank_log.read_text():
        pass
    raise KeyError("second")

@mark
def test_one_skips(rank):
    if rank == 1:
        pytest.skip("alone")
"""


@pytest.fixture(scope="module")
def run(run_faults: RunFaults) -> Run:
    return run_faults(FROZEN, "--distcompat-timeout=60")


def test_a_frozen_clock_changes_no_verdict(run: Run) -> None:
    bad = ("test_hangs", "test_other_ranks_wait", "test_both_fail", "test_one_skips")
    good = ("test_of_the_parent", "test_well")
    assert run.outcomes == dict.fromkeys(bad, "failed") | dict.fromkeys(good, "passed"), run.out


def test_a_hang_ends_at_its_time_limit(run: Run) -> None:
    run.shows("test_hangs", "time limit of 3 s: rank 1 *")


def test_the_rank_that_failed_first_is_shown_first_under_a_frozen_clock(run: Run) -> None:
    run.shows("test_both_fail", "rank 1 failed: ValueError: first", "--- rank 0: failed: KeyError: 'second' ---")
    assert run.causes("test_both_fail") == [1, 0]
    assert run.consequences("test_other_ranks_wait") == {0}


def test_no_process_file_or_lease_remains(run: Run) -> None:
    assert not run.leftovers_by_test
    assert not run.leftovers
