"""A rank that hangs, anywhere: the test fails at its time limit and says where each rank was; the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import Run, RunFaults

pytestmark = pytest.mark.spawn

#: Test: the ranks that hang, each with functions that its stack has, innermost first.
FAULTS: dict[str, dict[int, list[str]]] = {
    "test_each_elsewhere": {0: ["fall_asleep"], 1: ["loop"], 2: ["hold_the_lock"], 3: ["all_reduce", "meet"]},
    "test_one_asleep_the_other_done": {1: ["fall_asleep", "test_one_asleep_the_other_done"]},
    "test_deaf": {0: ["all_reduce", "meet"], 1: []},
    "test_another_collective": {0: ["all_reduce", "meet"], 1: ["test_another_collective"]},
    "test_another_order_of_groups": {0: ["test_another_order_of_groups"], 1: ["test_another_order_of_groups"]},
    "test_dataloader_workers": {0: ["all_reduce"], 1: ["test_dataloader_workers"]},
    "test_import": {1: ["<module>", "test_import"]},
    "test_setup": {0: ["init_process_group"], 1: ["fall_asleep", "hangs_up"]},
    "test_teardown": {1: ["fall_asleep", "hangs_down"]},
    "test_thread_at_exit": {1: ["fall_asleep"]},
    "test_finalizer_at_exit": {1: ["fall_asleep"]},
}


@pytest.fixture(scope="module")
def run(run_faults: RunFaults) -> Run:
    """With xdist: ranks that sleep take no time from others."""
    return run_faults("faults_hang.py", "-n", "3", "--distcompat-timeout=60")


def test_all_fail_and_the_session_goes_on(run: Run) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    assert {name for name, end in run.outcomes.items() if end == "passed"} == {"test_well"}, run.out
    assert set(run.outcomes.values()) == {"passed", "failed"}


@pytest.mark.parametrize("name", FAULTS)
def test_who_hangs_is_named_and_where(name: str, run: Run) -> None:
    word = "rank" if len(FAULTS[name]) == 1 else "ranks"
    run.shows(name, f"time limit of 2 s: {word} {', '.join(map(str, FAULTS[name]))} still running")
    assert sorted(run.causes(name)) == list(FAULTS[name])
    for rank, functions in FAULTS[name].items():
        stack = run.section(name, rank).splitlines()
        pytest.LineMatcher(stack).fnmatch_lines([f"  File *, line * in {function}" for function in functions])


def test_a_collective_that_nobody_joins(run: Run) -> None:
    # The others are done and gone: rank 2 loses them.
    run.shows("test_nobody_joins", "rank 2 failed: *", "consequences:")
    assert (run.causes("test_nobody_joins"), run.consequences("test_nobody_joins")) == ([2], {0, 1, 3})


def test_a_collective_of_another_shape(run: Run) -> None:
    # gloo sees the mismatch on the side that gets too much, and the other one loses its peer; or both wait.
    assert run.lines("test_another_shape")[0].startswith(("rank ", "time limit of 2 s: ranks 0, 1"))


def test_what_hangs_at_exit_on_all_ranks(run: Run) -> None:
    run.shows("test_atexit_on_all", "time limit of 2 s*")
    assert "fall_asleep" in "\n".join(run.lines("test_atexit_on_all"))


def test_a_rank_that_hangs_does_not_hide_who_raised(run: Run) -> None:
    run.shows(
        "test_raises_while_the_other_hangs", "rank 1 failed: ValueError: the cause", "consequences:", "  rank 0 *"
    )


def test_nothing_is_left(run: Run) -> None:
    assert not run.left_by_tests
    assert not run.left
