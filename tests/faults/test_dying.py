"""A rank that dies without a word, by whatever: the test fails, the signal or exit code is named, no xfail excuses it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.faults.expected import ALL, Expected, expect_soon

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults
    from tests.faults.forms import Form
    from tests.faults.runs import Run

pytestmark = pytest.mark.spawn

#: Seconds that the time limit leaves to each.
LIMIT = 30
FAULTS = {
    "test_exits_0_while_the_other_waits": Expected((1,), "rank 1 exited with code 0 without a report", ("consequences:",)),
    "test_exits_0_while_the_other_is_done": Expected((1,), "rank 1 exited with code 0 without a report"),
    "test_exits_0_everywhere": Expected(ALL, "rank * exited with code 0 without a report", size=4),
    "test_exits_3": Expected((1,), "rank 1 exited with code 3 without a report"),
    "test_killed": Expected((-2,), "rank {0} was killed by SIGKILL", ("consequences:",), size=4),
    "test_terminated": Expected((0,), "rank 0 was killed by SIGTERM", ("consequences:",)),
    "test_segfault_in_c": Expected(
        (1,), "rank 1 was killed by SIGSEGV",
        ("last output:", "Fatal Python error: Segmentation fault", "  File *test_die.py*, line * in fault_below"),
    ),
    "test_abort_in_c": Expected(
        (1,), "rank 1 was killed by SIGABRT",
        ("last output:", "Fatal Python error: Aborted", "  File *test_die.py*, line * in test_abort_in_c"),
    ),
    "test_bus_error": Expected(
        (1,), "rank 1 was killed by SIGBUS",
        ("last output:", "Fatal Python error: Bus error", "  File *test_die.py*, line * in test_bus_error"),
    ),
    "test_cpu_limit": Expected((1,), "rank 1 was killed by SIGXCPU"),
    "test_address_space": Expected((1,), "rank 1 failed: RuntimeError: *can't allocate memory*"),
    "test_python_memory": Expected((1,), "rank 1 failed: MemoryError"),
    "test_in_a_thread": Expected((1,), "rank 1 exited with code 0 without a report"),
    "test_turns_into_a_daemon": Expected((1,), "rank 1 exited with code 0 without a report"),
    "test_turns_into_a_daemon_in_setup": Expected((1,), "rank 1 exited with code 0 without a report"),
    "test_its_child_goes_on_too": Expected((1,), "rank 1 exited with code 0 without a report"),
    "test_in_setup": Expected((1,), "rank 1 was killed by SIGKILL"),
    "test_in_teardown": Expected((1,), "rank 1 exited with code 0 without a report"),
    # The agent ends the other rank if that has not ended by then.
    "test_when_the_interpreter_ends": Expected(
        (1,), "rank 1 was killed by SIGSEGV after it had finished its work", others=None
    ),
    "test_dataloader_worker": Expected((1,), "rank 1 failed: RuntimeError: DataLoader worker (pid* exited unexpectedly*"),
    "test_expected_failure": Expected((1,), "rank 1 was killed by SIGABRT", ("last output:", "*Fatal Python error: Aborted")),
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
def run(run_faults: RunFaults, memory: Path | None, form: Form) -> Run:
    select = ("-k", "") if memory else ("-k", "not out_of_memory")
    return run_faults(
        "faults_die.py", *select, f"--distcompat-timeout={LIMIT}", *form.args, **form.more, FAULTS_CGROUP=str(memory)
    )


def test_all_fail_and_the_session_goes_on(run: Run, memory: Path | None) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    names = {*FAULTS, "test_two_die", "test_one_dies_after_another_raised"}
    names |= {"test_out_of_memory"} if memory else set()
    assert run.outcomes == dict.fromkeys(("test_well", "test_well_after_all"), "passed") | dict.fromkeys(
        names, "failed"
    )


def test_failures_are_reported_soon(run: Run) -> None:
    # Some take a while to die: a second of a core that others want too; a data loader's process starts.
    own = {"test_cpu_limit": 5.0, "test_dataloader_worker": 5.0, "test_out_of_memory": 5.0}
    expect_soon(run, {name: own.get(name, 0.0) for name in run.outcomes}, LIMIT)


def test_faults_happen_on_ranks_that_ran_a_test_before(run: Run, form: Form) -> None:
    if form.reuses_ranks:
        run.shows_used_ranks()


@pytest.mark.parametrize("name", FAULTS)
def test_the_dead_rank_and_its_signal_or_code_are_the_cause(name: str, run: Run) -> None:
    FAULTS[name].expect(run, name)


def test_the_kernel_ends_a_rank_that_has_too_much_memory(run: Run, memory: Path | None) -> None:
    if memory is None:
        pytest.skip("no control group can be made here")
    lines = (
        "*the kernel killed * for lack of memory since the rank started",
        "resident memory of the rank*",
        "consequences:",
        "  rank 0 *",
    )
    run.shows("test_out_of_memory", "rank 1 was killed by SIGKILL*", *lines)
    assert "the kernel killed no process" not in run.section("test_out_of_memory", 1)


def test_the_last_output_of_a_dead_rank_is_shown(run: Run) -> None:
    assert "words before the end" in str(run.of("test_exits_3"))
    assert "words before the end" in str(run.of("test_expected_failure"))


def test_two_dead_ranks_are_both_shown(run: Run) -> None:
    run.shows("test_two_die", "rank [01] *")
    report = "\n".join(run.lines("test_two_die"))
    assert "rank 1: was killed by SIGKILL" in report


def test_a_death_after_an_exception_is_shown_below_it(run: Run) -> None:
    run.shows(
        "test_one_dies_after_another_raised", "rank 0 failed: ValueError: first", "*rank 1: was killed by SIGKILL*"
    )


def test_no_process_file_or_lease_remains(run: Run) -> None:
    assert run.shares_ranks or not run.leftovers_by_test
    # Those of data loaders' workers stay: ranks start processes by forkserver.
    assert not [name for name in run.leftovers if "sem.mp-" not in name]
