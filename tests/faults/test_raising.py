"""An exception on a rank, of any kind and at any time: the test fails, that rank is the cause, its peers are folded."""

from __future__ import annotations

import sys
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
    "test_before": Expected(
        (-2,), "rank {0} failed: ValueError: before the collective", (">           raise ValueError*",), size=4
    ),
    "test_inside": Expected((1,), "rank 1 failed: TypeError: *", ("*distributed.all_reduce(*", "consequences:")),
    "test_while_one_is_under_way": Expected(
        (1,), "rank 1 failed: ArithmeticError: while it is under way", ("*raise ArithmeticError(*", "consequences:")
    ),
    "test_in_a_collective_that_a_peer_abandoned": Expected(
        (0,), "rank 0 failed: RuntimeError: [[]Rank 0[]]: Rank 1 failed to pass monitoredBarrier in 500 ms",
        ("*distributed.monitored_barrier(*", "consequences:"),
    ),
    "test_in_a_hook_of_the_reducer": Expected(
        (1,), "rank 1 failed: ArithmeticError: in a hook of the reducer", ("*raise ArithmeticError(*", "consequences:")
    ),
    "test_inside_of_backward": Expected(
        (1,), "rank 1 failed: ArithmeticError: in the backward pass", ("*def hook*",), size=4
    ),
    "test_after": Expected((1,), "rank 1 failed: ValueError: after the collective"),
    "test_after_while_the_others_meet_again": Expected(
        (-1,), "rank {0} failed: ValueError: between two collectives", ("consequences:",), size=4
    ),
    "test_different": Expected(
        (-2, -3), "rank {0} failed: ValueError: the first", ("--- rank 1: failed: TypeError: the second ---",), size=4
    ),
    "test_on_all": Expected(ALL, "rank [0123] failed: ValueError: on rank [0123]"),
    "test_in_a_thread_that_is_waited_for": Expected((1,), "rank 1 failed: ValueError: in a thread"),
    "test_in_a_forked_child": Expected((1,), "rank 1 failed: ValueError: in a forked child", others=False),
    "test_dataloader_worker_raises": Expected(
        (1,), "rank 1 failed: LookupError: Caught LookupError in DataLoader worker process 0.", ("*in worker process*",)
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
def run(run_faults: RunFaults, form: Form) -> Run:
    return run_faults("faults_raise.py", f"--distcompat-timeout={LIMIT}", *form.args, **form.more)


def test_all_fail_and_the_session_goes_on(run: Run) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    failed = [*FAULTS, *(f"test_one[{act}]" for act in ONE)]
    assert run.outcomes == dict.fromkeys(("test_well", "test_well_after_all"), "passed") | dict.fromkeys(
        failed, "failed"
    )


def test_failures_are_reported_soon(run: Run) -> None:
    # A data loader starts a process, which imports torch where ranks were not forked.
    own = {"test_dataloader_worker_raises": 5.0}
    expect_soon(run, {name: own.get(name, 0.0) for name in run.outcomes}, LIMIT)


def test_faults_happen_on_ranks_that_ran_a_test_before(run: Run, form: Form) -> None:
    if form.reuses_ranks:
        run.shows_used_ranks()


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_exception_is_the_cause(name: str, run: Run) -> None:
    FAULTS[name].expect(run, name)


def test_an_exception_on_all_ranks_has_all_as_cause(run: Run) -> None:
    assert sorted(run.causes("test_on_all")) == list(range(run.world_size or 2))
    assert not run.consequences("test_on_all")


@pytest.mark.parametrize("act", ONE)
def test_every_kind_of_exception_is_shown_as_raised(act: str, run: Run) -> None:
    first, more = ONE[act]
    run.shows(f"test_one[{act}]", first, *more)
    assert run.causes(f"test_one[{act}]")[0] == 1


def test_no_process_file_or_lease_remains(run: Run) -> None:
    assert run.shares_ranks or not run.leftovers_by_test
    # Those of data loaders' workers stay: ranks start processes by forkserver.
    assert not [name for name in run.leftovers if "sem.mp-" not in name]
