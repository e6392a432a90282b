"""An exception on a rank, of any kind and at any time: the test fails, that rank is the cause, its peers are folded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import Run, RunFaults

pytestmark = pytest.mark.spawn

#: Test: its causes, in order; who is folded; the first line of its report; more of its lines.
FAULTS: dict[str, tuple[list[int], set[int], str, list[str]]] = {
    "test_before": ([2], {0, 1, 3}, "rank 2 failed: ValueError: before the collective", [">           raise ValueError*"]),
    "test_inside": ([1], {0}, "rank 1 failed: TypeError: *", ["*distributed.all_reduce(*", "consequences:"]),
    "test_inside_of_backward": ([1], {0, 2, 3}, "rank 1 failed: ArithmeticError: in the backward pass", ["*def hook*"]),
    "test_after": ([1], {0}, "rank 1 failed: ValueError: after the collective", []),
    "test_after_while_the_others_meet_again": (
        [3], {0, 1, 2}, "rank 3 failed: ValueError: between two collectives", ["consequences:"],
    ),
    "test_different": (
        [2, 1], {0, 3}, "rank 2 failed: ValueError: the first", ["--- rank 1: failed: TypeError: the second ---"],
    ),
    "test_on_all": ([], set(), "rank [01] failed: ValueError: on rank [01]", []),
    "test_in_a_thread_that_is_waited_for": ([1], {0}, "rank 1 failed: ValueError: in a thread", []),
    "test_dataloader_worker_raises": (
        [1], {0}, "rank 1 failed: LookupError: Caught LookupError in DataLoader worker process 0.", ["*in worker process*"],
    ),
}  # fmt: skip
#: What rank 1 raises while rank 0 is in a collective: the first line, more lines.
ONE = {
    "needy": ("rank 1 failed: *Needy: needs 1 and 2", []),
    "handful": ("rank 1 failed: *Handful: hands full", []),
    "halt": ("rank 1 failed: *Halt: not an Exception", []),
    "speechless": ("rank 1 failed: *Speechless*", []),
    "group": ("rank 1 failed: *several (2 sub-exceptions)", ["*ValueError: the one", "*TypeError: the other"]),
    "chained": ("rank 1 failed: RuntimeError: on top", ["*KeyError: 'deep down'", "*direct cause*"]),
    "exit 0": ("rank 1 failed: SystemExit: 0", []),
    "exit 3": ("rank 1 failed: SystemExit: 3", []),
    "exit text": ("rank 1 failed: SystemExit: bye", []),
    "interrupt": ("rank 1 raised KeyboardInterrupt", []),
    "pytest.exit": ("rank 1 raised *Exit: all stop", []),
    "surrogate": (r"rank 1 failed: ValueError: odd \udcff text", []),
    "lines": ("rank 1 failed: ValueError: first line", ["E   *second line"]),
    "like a lost peer": ("rank 1 failed: RuntimeError: Connection closed by peer, says my own code", []),
}
if sys.version_info < (3, 11):
    ONE["group"] = ("rank 1 failed: ValueError: several", [])


@pytest.fixture(scope="module")
def run(run_faults: RunFaults, workers: tuple[str, ...]) -> Run:
    return run_faults("faults_raise.py", "--distcompat-timeout=30", *workers)


def test_all_fail_and_the_session_goes_on(run: Run) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    names = ["test_well", *FAULTS, *(f"test_one[{act}]" for act in ONE)]
    assert run.outcomes == {name: "passed" if name == "test_well" else "failed" for name in names}


@pytest.mark.parametrize("name", FAULTS)
def test_who_raised_first_is_the_cause(name: str, run: Run) -> None:
    causes, folded, first, more = FAULTS[name]
    run.shows(name, first, *more)
    if causes:
        assert (run.causes(name), run.consequences(name)) == (causes, folded)


def test_one_exception_on_all_ranks_is_shown_of_all(run: Run) -> None:
    assert sorted(run.causes("test_on_all")) == [0, 1]
    assert not run.consequences("test_on_all")


@pytest.mark.parametrize("act", ONE)
def test_whatever_is_raised_is_told_as_it_is(act: str, run: Run) -> None:
    first, more = ONE[act]
    run.shows(f"test_one[{act}]", first, *more)
    assert run.causes(f"test_one[{act}]")[0] == 1


def test_nothing_is_left(run: Run) -> None:
    assert run.shares_ranks or not run.left_by_tests
    # Semaphores of data loaders: while ranks start processes by forkserver, see test_state.py.
    assert not [left for left in run.left if "sem.mp-" not in left]
