"""A rank that hangs, anywhere: the test fails at its time limit and says where each rank was; the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.conftest import Run, RunFaults

pytestmark = pytest.mark.spawn

REDUCE = "all_reduce (default_pg, #2) at *faults_group.py:*"
ASLEEP = "in fall_asleep at test_hang.py:*: time.sleep(600)"
#: Test: what the headline says after the time limit; the ranks that hang, each with functions that its stack has, innermost first.
FAULTS: dict[str, tuple[str, dict[int, list[str]]]] = {
    "test_each_elsewhere": (
        f"rank 0 is {ASLEEP}; rank 1 is in loop at test_hang.py:*; rank 2 is in hold_the_lock at test_hang.py:*; rank 3 waits in {REDUCE}",
        {0: ["fall_asleep"], 1: ["loop"], 2: ["hold_the_lock"], 3: ["all_reduce", "meet"]},
    ),
    "test_one_asleep_the_other_done": (f"rank 1 is {ASLEEP}", {1: ["fall_asleep", "test_one_asleep_the_other_done"]}),
    "test_deaf": (
        f"rank 0 waits in {REDUCE}; rank 1 is in wait_for_a_lock at test_hang.py:*",
        {0: ["all_reduce", "meet"], 1: ["wait_for_a_lock"]},
    ),
    "test_deaf_and_alone": (f"rank 0 is {ASLEEP}; rank 1 gave no stack", {0: ["fall_asleep"], 1: []}),
    "test_another_collective": (
        f"different collectives: rank 0 waits in {REDUCE}; rank 1 waits in broadcast_object_list (broadcast, default_pg, #2) at *",
        {0: ["all_reduce", "meet"], 1: ["broadcast", "broadcast_object_list", "test_another_collective"]},
    ),
    "test_another_order_of_groups": (
        "rank 0 waits in all_reduce (group 1, #1) at test_hang.py:*; rank 1 waits in all_reduce (group 2, #1) at *",
        {0: ["test_another_order_of_groups"], 1: ["test_another_order_of_groups"]},
    ),
    "test_other_tensors": (
        f"different tensors: rank 0 waits in all_reduce (default_pg, #3) at *faults_group.py:*; rank 1 is {ASLEEP}",
        {0: ["all_reduce", "meet"], 1: ["fall_asleep"]},
    ),
    "test_objects": (
        "ranks 0, 1, 3 wait in all_gather_object (all_gather, default_pg, #2) at test_hang.py:*; rank 2 is in loop at *",
        {0: ["all_gather_object"], 1: ["all_gather_object"], 2: ["loop"], 3: ["all_gather_object"]},
    ),
    "test_receiver": (f"rank 0 waits in recv at test_hang.py:*; rank 1 is {ASLEEP}", {0: ["recv"], 1: ["fall_asleep"]}),
    "test_backward": (
        f"rank 0 waits in all_reduce (default_pg, #5) at test_hang.py:*; rank 1 is {ASLEEP}",
        {0: ["backward", "test_backward"], 1: ["fall_asleep"]},
    ),
    "test_left_to_itself": (
        f"rank 0 is {ASLEEP}, with all_reduce (default_pg, #2) unfinished; rank 1 is {ASLEEP}",
        {0: ["fall_asleep"], 1: ["fall_asleep"]},
    ),
    "test_dataloader_workers": (
        "rank 0 waits in all_reduce (default_pg, #2) at *; rank 1 is in test_dataloader_workers at test_hang.py:*: list(DataLoader*",
        {0: ["all_reduce"], 1: ["test_dataloader_workers"]},
    ),
    "test_import": ("rank 1 is in <module> at *never_there.py:2: time.sleep(600)", {1: ["<module>", "test_import"]}),
    "test_setup": (
        f"rank 0 waits in init_process_group at *; rank 1 is {ASLEEP}",
        {0: ["init_process_group"], 1: ["fall_asleep", "hangs_up"]},
    ),
    "test_teardown": (f"rank 1 is {ASLEEP}", {1: ["fall_asleep", "hangs_down"]}),
    "test_thread_at_exit": (f"rank 1 is {ASLEEP}", {1: ["fall_asleep"]}),
    "test_finalizer_at_exit": (f"rank 1 is {ASLEEP}", {1: ["fall_asleep"]}),
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
    said, hanging = FAULTS[name]
    run.shows(name, f"time limit of 2 s: {said}")
    assert sorted(run.causes(name)) == list(hanging)
    for rank, functions in hanging.items():
        stack = run.section(name, rank).splitlines()
        pytest.LineMatcher(stack).fnmatch_lines([f"  File *, line * in {function}" for function in functions])


def test_a_collective_that_nobody_joins(run: Run) -> None:
    # The others are done and gone: rank 2 loses them.
    run.shows("test_nobody_joins", "rank 2 failed: *", "consequences:")
    assert (run.causes("test_nobody_joins"), run.consequences("test_nobody_joins")) == ([2], {0, 1, 3})


def test_a_collective_of_another_shape(run: Run) -> None:
    # gloo sees the mismatch on the side that gets too much, and the other one loses its peer; or both wait.
    lines = run.lines("test_another_shape")
    assert lines[0].startswith(("rank ", "time limit of 2 s: different tensors: rank"))
    if lines[0].startswith("time limit"):
        pytest.LineMatcher(lines).fnmatch_lines(
            [
                "different tensors at #2 of default_pg: rank 0 all_reduce of Float[[]2[]]; rank 1 all_reduce of Float[[]1048576[]]"
            ]
        )


def test_where_the_ranks_part(run: Run) -> None:
    for name, said in {
        "test_another_collective": "different collectives at #2 of default_pg: rank 0 all_reduce of Float[2]; rank 1 broadcast of Long[1]",
        "test_other_tensors": "different tensors at #2 of default_pg: rank 0 all_reduce of Float[2]; rank 1 all_reduce of Int[2]",
    }.items():
        assert run.lines(name)[2] == said


def test_the_last_collectives_of_each_rank(run: Run) -> None:
    ended, begun = "barrier (default_pg, #1)", "all_reduce (default_pg, #2) of Float[2], unfinished"
    # Whatever a rank does: it sleeps, it is in a loop, it holds the GIL, it waits.
    for rank, said in enumerate((ended, ended, ended, f"{ended}; {begun}")):
        assert f"last collectives: {said}" in run.section("test_each_elsewhere", rank).splitlines()


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
