"""Ranks that do not agree whether to run a test, or that it may fail: never a skip, never a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.faults.expected import Expected, expect_in_time, expect_soon

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults
    from tests.faults.forms import Form
    from tests.faults.runs import Run

pytestmark = pytest.mark.spawn

#: Seconds that the time limit leaves to each, but for the one that hangs.
LIMIT = 30
#: How long after all others those skip, pass or fail that are late: longer than a rank that fails waits for the others.
LATE = 0.7
NOT_HERE = ("*: Skipped: not here",)
#: Tests that fail. Who skipped or was excused before another one failed is shown beside it.
FAILED = {
    "test_skip_and_pass": Expected((0,), "rank 0 skipped (not here) while other ranks went on", NOT_HERE),
    "test_skip_and_wait": Expected((-2,), "rank {0} skipped (not here) while other ranks went on", NOT_HERE, size=4),
    "test_skip_and_fail": Expected(
        (1,), "rank 1 failed: ValueError: the worst", ("*rank*0*: skipped (not here)*",), beside=True
    ),
    "test_fail_and_skip": Expected(
        (1,), "rank 1 failed: ValueError: the worst", ("*rank*0*: skipped (not here)*",), beside=True
    ),
    "test_skip_and_die": Expected(
        (1,), "rank 1 was killed by SIGKILL", ("*rank*0*: skipped (not here)*",), beside=True
    ),
    "test_skip_and_hang": Expected(
        (1,),
        "time limit of 3 s: rank 1 is in test_skip_and_hang at test_skip.py:*: time.sleep(600)",
        ("*in test_skip_and_hang", "*rank*0*: skipped (not here)*"),
        beside=True,
    ),
    "test_importorskip": Expected(
        (1,),
        "rank 1 skipped (could not import 'no_such_module_anywhere'*",
        ("*test_skip.py:*: Skipped: *",),
    ),
    "test_in_setup": Expected(
        (1,), "rank 1 skipped (not set up) while other ranks went on", ("*: Skipped: not set up",)
    ),
    "test_mark_of_one_rank": Expected((1,), "rank 1 skipped (by rank) while other ranks went on"),
    "test_unittest": Expected((1,), "rank 1 skipped (not here) while other ranks went on"),
    "test_xfail_and_fail": Expected((1, 0), "rank 1 failed: ValueError: another one"),
    "test_xfail_and_die": Expected((1, 0), "rank 1 was killed by SIGKILL"),
    "test_xfail_mark_of_one_rank": Expected((1, 0), "rank 1 failed: KeyError: 'not excused here'"),
    "test_xfail_added_on_one": Expected((1, 0), "rank 1 failed: ValueError: on rank 1"),
    "test_xfail_and_words": Expected((1, 0), "rank 1 failed: AssertionError: assert 'Broken pipe' == 'x'*"),
    "test_xfail_and_refused": Expected((1, 0), "rank 1 failed: RuntimeError: Connection refused"),
    "test_xfail_and_fail_late": Expected((1, 0), "rank 1 failed: ValueError: late"),
    "test_xfail_and_exit_late": Expected((1, 0), "rank 1 exited with code 3 without a report"),
    "test_xfail_and_loop": Expected(
        (1, 0), "time limit of 3 s: rank 1 is in test_xfail_and_loop at test_skip.py:*", others=False
    ),
    "test_xfail_while_a_third_works": Expected((-1, 0), "rank {0} failed: ValueError: late", size=4),
    "test_xfail_and_own_store": Expected((1, 0), "rank 1 failed: torch.distributed.DistNetworkError: *"),
    "test_xfail_and_wait_for_a_thread": Expected((1, 0), "rank 1 failed: ValueError: late, beside *"),
    "test_xfail_and_wait_for_a_lock": Expected((1, 0), "rank 1 failed: ValueError: late, beside *"),
    "test_xfail_and_acquire": Expected((1, 0), "rank 1 failed: ValueError: late, beside *"),
    "test_xfail_and_own_group": Expected((1, 0), "rank 1 failed: torch.distributed.DistNetworkError: *"),
    "test_xfail_and_teardown": Expected((), "rank * failed in teardown: RuntimeError: on the way down"),
}
#: The others.
ENDS = {
    "test_well": "passed",
    "test_well_after_all": "passed",
    "test_all_skip_at_last": "skipped",
    "test_reasons_differ": "skipped",
    "test_xfail_and_pass": "xfailed",
    "test_xfail_and_wait": "xfailed",
    "test_skip_and_expected_failure": "xfailed",
    "test_xfail_and_skip_late": "xfailed",
    "test_xfail_on_all": "xfailed",
    "test_xfail_and_wait_for_work": "xfailed",
    "test_all_skip_much_later": "skipped",
}
#: Those of them that all ranks ran to their ends, so that they do the next test too.
WELL = ("test_xfail_and_pass", "test_xfail_on_all")
BY_PROCESS = """
import os
import pytest

@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("number", [os.getpid()])
def test_collected_by_process(number, rank):
    pass
"""
#: Started by torchrun, each rank collects for itself.
BY_RANK = """
import os
import pytest

pytestmark = pytest.mark.distcompat(world_size=2)
rank_here = os.environ.get("RANK", "0")

@pytest.mark.parametrize("number", [1, 2] if rank_here == "0" else [1])
def test_parameters(number, rank):
    pass

if rank_here == "0":
    def test_on_one_rank(rank, process_group):
        pass
"""


@pytest.fixture(scope="module")
def run(run_faults: RunFaults, form: Form) -> Run:
    return run_faults("faults_skip.py", f"--distcompat-timeout={LIMIT}", *form.args, **form.more)


@pytest.fixture(scope="module")
def collected_by_rank(run_faults: RunFaults) -> Run:
    return run_faults(BY_RANK, "--distcompat-launcher=torchrun", "--distcompat-timeout=60", "-n", "2")


def test_the_verdict_is_that_of_the_worst_rank(run: Run) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    assert run.outcomes == {**dict.fromkeys(FAILED, "failed"), **ENDS}


@pytest.mark.parametrize("name", FAILED)
def test_the_worst_rank_is_shown_first(name: str, run: Run) -> None:
    FAILED[name].expect(run, name, in_order="hang" not in name)


def test_failures_are_reported_soon(run: Run) -> None:
    hanging = {"test_skip_and_hang": 3.0, "test_xfail_and_loop": 3.0}
    own = {"test_all_skip_much_later": 6.0}
    expect_soon(run, {name: own.get(name, LATE) for name in run.outcomes if name not in hanging}, LIMIT)
    expect_in_time(run, hanging)


def test_faults_happen_on_ranks_that_ran_a_test_before(run: Run, form: Form) -> None:
    if form.reuses_ranks:
        run.shows_used_ranks(*WELL)


@pytest.mark.nightly
def test_parameters_that_depend_on_the_process(run_faults: RunFaults) -> None:
    run = run_faults(BY_PROCESS)
    (name,) = run.outcomes
    assert run.outcome(name) == "failed"
    run.shows(name, "rank [01] raised LookupError: *this rank collected no item*", "*close to it: *")
    assert not run.leftovers


def test_ranks_that_collect_other_parameters(collected_by_rank: Run) -> None:
    run = collected_by_rank
    assert run.outcomes == {
        "test_parameters[1]": "passed",
        "test_parameters[2]": "failed",
        "test_on_one_rank": "failed",
    }, run.out
    run.shows("test_parameters[2]", "rank 1 raised LookupError: *collected no item*parameters[[]2[]]*")
    run.shows(
        "test_on_one_rank", "rank 1 raised LookupError: *collected no item*on_one_rank*", "consequences:", "  rank 0 *"
    )


def test_no_process_file_or_lease_remains(run: Run, collected_by_rank: Run) -> None:
    for suite_run in (run, collected_by_rank):
        assert suite_run.shares_ranks or not suite_run.leftovers_by_test
        assert not suite_run.leftovers
