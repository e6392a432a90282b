"""A rank that dies without a word, by whatever: the test fails, the signal or exit code is named, no xfail excuses it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import Run, RunFaults

pytestmark = pytest.mark.spawn

#: Test: its causes; who is folded; the first line of its report; more of its lines.
FAULTS: dict[str, tuple[list[int], set[int], str, list[str]]] = {
    "test_exits_0_while_the_other_waits": ([1], {0}, "rank 1 exited with code 0 without a report", ["consequences:"]),
    "test_exits_0_while_the_other_is_done": ([1], {0}, "rank 1 exited with code 0 without a report", []),
    "test_exits_0_everywhere": ([0, 1, 2, 3], set(), "rank * exited with code 0 without a report", []),
    "test_exits_3": ([1], {0}, "rank 1 exited with code 3 without a report", []),
    "test_killed": ([2], {0, 1, 3}, "rank 2 was killed by SIGKILL", ["consequences:"]),
    "test_terminated": ([0], {1}, "rank 0 was killed by SIGTERM", ["consequences:"]),
    "test_segfault_in_c": (
        [1], {0}, "rank 1 was killed by SIGSEGV",
        ["last output:", "Fatal Python error: Segmentation fault", "  File *test_die.py*, line * in test_segfault_in_c"],
    ),
    "test_abort_in_c": (
        [1], {0}, "rank 1 was killed by SIGABRT",
        ["last output:", "Fatal Python error: Aborted", "  File *test_die.py*, line * in test_abort_in_c"],
    ),
    "test_bus_error": (
        [1], {0}, "rank 1 was killed by SIGBUS",
        ["last output:", "Fatal Python error: Bus error", "  File *test_die.py*, line * in test_bus_error"],
    ),
    "test_cpu_limit": ([1], {0}, "rank 1 was killed by SIGXCPU", []),
    "test_address_space": ([1], {0}, "rank 1 failed: RuntimeError: *can't allocate memory*", []),
    "test_python_memory": ([1], {0}, "rank 1 failed: MemoryError", []),
    "test_in_a_thread": ([1], {0}, "rank 1 exited with code 0 without a report", []),
    "test_in_setup": ([1], {0}, "rank 1 was killed by SIGKILL", []),
    "test_in_teardown": ([1], {0}, "rank 1 exited with code 0 without a report", []),
    "test_when_the_interpreter_ends": ([1], set(), "rank 1 was killed by SIGSEGV after it had finished its work", []),
    "test_dataloader_worker": ([1], {0}, "rank 1 failed: RuntimeError: DataLoader worker (pid* exited unexpectedly*", []),
    "test_expected_failure": ([1], {0}, "rank 1 was killed by SIGABRT", ["last output:", "*Fatal Python error: Aborted"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def memory() -> Iterator[Path | None]:
    """A control group with a small memory limit, where one can be made."""
    for base, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        group = Path(base, f"distcompat-faults-{os.getpid()}")
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(2**25), encoding="ascii")
                yield group
                return
            finally:
                group.rmdir()
    yield None


@pytest.fixture(scope="module")
def run(run_faults: RunFaults, memory: Path | None, workers: tuple[str, ...]) -> Run:
    select = ("-k", "") if memory else ("-k", "not out_of_memory")
    return run_faults("faults_die.py", *select, "--distcompat-timeout=30", *workers, FAULTS_CGROUP=str(memory))


def test_all_fail_and_the_session_goes_on(run: Run, memory: Path | None) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    names = {"test_well", *FAULTS, "test_two_die", "test_one_dies_after_another_raised"}
    names |= {"test_out_of_memory"} if memory else set()
    assert run.outcomes == {name: "passed" if name == "test_well" else "failed" for name in names}


@pytest.mark.parametrize("name", FAULTS)
def test_who_died_is_the_cause_and_how_is_said(name: str, run: Run) -> None:
    causes, folded, first, more = FAULTS[name]
    run.shows(name, first, *more)
    assert (sorted(run.causes(name)), run.consequences(name)) == (causes, folded)


def test_the_kernel_ends_a_rank_that_has_too_much_memory(run: Run, memory: Path | None) -> None:
    if memory is None:
        pytest.skip("no control group can be made here")
    run.shows("test_out_of_memory", "rank 1 was killed by SIGKILL*", "consequences:", "  rank 0 *")


def test_the_last_words_of_a_rank_are_shown(run: Run) -> None:
    assert "words before the end" in str(run.of("test_exits_3"))
    assert "words before the end" in str(run.of("test_expected_failure"))


def test_two_that_die_are_both_shown(run: Run) -> None:
    run.shows("test_two_die", "rank [01] *")
    told = "\n".join(run.lines("test_two_die"))
    assert "rank 1: was killed by SIGKILL" in told


def test_a_death_after_an_exception_is_shown_below_it(run: Run) -> None:
    run.shows(
        "test_one_dies_after_another_raised", "rank 0 failed: ValueError: first", "*rank 1: was killed by SIGKILL*"
    )


def test_nothing_is_left(run: Run) -> None:
    assert run.shares_ranks or not run.left_by_tests
    # Semaphores of data loaders: while ranks start processes by forkserver, see test_state.py.
    assert not [left for left in run.left if "sem.mp-" not in left]
