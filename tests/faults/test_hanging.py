"""A rank that hangs, anywhere: the test fails at its time limit and says where each rank was; the others go on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.faults.expected import Expected, expect_in_time, expect_soon
from tests.faults.forms import FORMS, Form

if TYPE_CHECKING:
    from tests.faults.conftest import RunFaults
    from tests.faults.runs import Run

pytestmark = pytest.mark.spawn

REDUCE = "waits in all_reduce (default_pg, #{1}) at *faults_group.py:*"
ASLEEP = "is in fall_asleep at test_hang.py:*: time.sleep(600)"
LOOP = "is in loop at test_hang.py:*"
REDUCES = (REDUCE, ["all_reduce", "meet"])
SLEEPS = (ASLEEP, ["fall_asleep"])
PEER_LOST = "rank {0} needed rank*, which had finished: it failed: RuntimeError: * Connection * by peer*"

#: All ranks that are not named.
OTHERS = 99
#: Test: by rank (those below 0 are counted from the last one) what the headline says of it after the time limit, and functions that
#: its stack has, innermost first. ``{1}`` is the number of the first collective of the test, ``{2}`` that of the second.
FAULTS: dict[str, dict[int, tuple[str, list[str]]]] = {
    "test_each_elsewhere": {
        -4: SLEEPS, -3: (LOOP, ["loop"]), -2: ("is in hold_the_lock at test_hang.py:*", ["hold_the_lock"]), -1: REDUCES,
    },
    "test_one_asleep_the_other_done": {1: (ASLEEP, ["fall_asleep", "test_one_asleep_the_other_done"])},
    "test_deaf": {OTHERS: REDUCES, 1: ("is in wait_for_a_lock at test_hang.py:*", ["wait_for_a_lock"])},
    "test_deaf_and_alone": {OTHERS: SLEEPS, 1: ("gave no stack", [])},
    "test_another_collective": {
        OTHERS: REDUCES,
        1: (
            "waits in broadcast_object_list (broadcast, default_pg, #{1}) at *",
            ["broadcast", "broadcast_object_list", "test_another_collective"],
        ),
    },
    "test_another_order_of_groups": {
        OTHERS: ("waits in all_reduce (group 1, #1) at test_hang.py:*", ["test_another_order_of_groups"]),
        1: ("waits in all_reduce (group 2, #1) at *", ["test_another_order_of_groups"]),
    },
    "test_other_tensors": {OTHERS: (REDUCE.replace("{1}", "{2}"), ["all_reduce", "meet"]), 1: SLEEPS},
    "test_objects": {
        OTHERS: ("waits in all_gather_object (all_gather, default_pg, #{1}) at test_hang.py:*", ["all_gather_object"]),
        -2: (LOOP, ["loop"]),
    },
    "test_receiver": {0: ("waits in recv at test_hang.py:*", ["recv"]), OTHERS: SLEEPS},
    "test_backward": {
        OTHERS: ("waits in all_reduce (default_pg, #{4}) at test_hang.py:*", ["backward", "test_backward"]), 1: SLEEPS,
    },
    "test_unfinished_async_op": {
        0: (f"{ASLEEP}, with all_reduce (default_pg, #{{1}}) unfinished", ["fall_asleep"]), OTHERS: SLEEPS,
    },
    "test_dataloader_workers": {
        OTHERS: ("waits in all_reduce (default_pg, #{1}) at *", ["all_reduce"]),
        1: ("is in test_dataloader_workers at test_hang.py:*: list(DataLoader*", ["test_dataloader_workers"]),
    },
    "test_import": {1: ("is in <module> at *never_there.py:2: time.sleep(600)", ["<module>", "test_import"])},
    "test_setup": {OTHERS: ("waits in init_process_group at *", ["init_process_group"]), 1: (ASLEEP, ["fall_asleep", "hangs_up"])},
    "test_teardown": {1: (ASLEEP, ["fall_asleep", "hangs_down"])},
    "test_thread_at_exit": {1: SLEEPS},
    "test_finalizer_at_exit": {1: SLEEPS},
}  # fmt: skip
#: Differences on reused ranks: they have a process group already, and a rank that waits for a finished peer does not lose it.
OF_REUSED_RANKS = {
    "test_setup": {1: (ASLEEP, ["fall_asleep", "hangs_up"])},
    "test_nobody_joins": {-2: REDUCES},
    "test_nobody_joins_with_a_number": {
        1: (
            "waits in all_reduce (default_pg, #{1}) at test_hang.py:*",
            ["all_reduce", "test_nobody_joins_with_a_number"],
        )
    },
    "test_the_group_is_destroyed_by_one": {1: ("waits in barrier (default_pg, #{1}) at test_hang.py:*", ["barrier"])},
}
#: What is asked of the headline when ranks part, before it names them.
PARTED = {"test_another_collective": "different collectives: ", "test_other_tensors": "different tensors: "}
#: Not at the time limit, for gloo notices: the verdict on fresh ranks.
AT_ONCE = {
    "test_nobody_joins": Expected((-2,), PEER_LOST, ("consequences:",), size=4),
    "test_nobody_joins_with_a_number": Expected((1,), PEER_LOST, ("consequences:",)),
    "test_the_group_is_destroyed_by_one": Expected((1,), PEER_LOST, ("consequences:",)),
}
NAMES = (*FAULTS, *AT_ONCE)
SIZES = {"test_each_elsewhere": 4, "test_objects": 4}
LIMIT = 2.0

#: These stand for the others in the daily run: each rank elsewhere, another collective, a Python loop, a peer that is done.
FEW = (
    "test_each_elsewhere",
    "test_another_collective",
    "test_objects",
    "test_nobody_joins",
    "test_nobody_joins_with_a_number",
)
FULL = (
    Form("three workers", ("-n", "3"), nightly=True),
    Form("three workers at 4", ("-n", "3"), 4, nightly=True),
    *(replace(FORMS[name], nightly=True) for name in ("alone", "workers", "reused", "reused at 4")),
)
OF_FEW = tuple(
    replace(
        FORMS[name],
        name=f"few {name}",
        args=(*FORMS[name].args, "-k", " or ".join(("test_well", *FEW))),
        nightly=name == "reused",
    )
    for name in ("alone", "reused")
)


def cases(*names: str) -> list[Any]:
    """These tests in all forms that run them."""
    return [
        pytest.param(form, name, id=f"{form.name}-{name}", marks=[pytest.mark.nightly] if form.nightly else [])
        for form in (*FULL, *OF_FEW)
        for name in names
        if form in FULL or name in FEW
    ]


def in_forms(*forms: Form) -> pytest.MarkDecorator:
    params = [pytest.param(form, id=form.name, marks=[pytest.mark.nightly] if form.nightly else []) for form in forms]
    return pytest.mark.parametrize("form", params, indirect=True)


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest) -> Form:
    parameter: Form = request.param
    return parameter


@pytest.fixture(scope="module")
def run(run_faults: RunFaults, form: Form) -> Run:
    return run_faults("faults_hang.py", "--distcompat-timeout=60", *form.args, **form.more)


def hanging(name: str, run: Run) -> dict[int, tuple[str, list[str]]]:
    """By rank what is expected of that test in that run; nothing, if none is to hang until the time limit."""
    size = run.world_size or SIZES.get(name, 2)
    expected = OF_REUSED_RANKS.get(name) if run.shares_ranks else None
    expected = expected or FAULTS.get(name, {})
    named = {rank % size: each for rank, each in expected.items() if -size <= rank < size}
    if OTHERS in expected:
        named = dict.fromkeys(range(size), expected[OTHERS]) | named
    return dict(sorted(named.items()))


def headline(name: str, run: Run) -> str:
    """The report begins with the ranks, grouped where the same is true of them."""
    begun = run.collectives_before(name)
    together: dict[str, list[int]] = {}
    for rank, (expected, _) in hanging(name, run).items():
        together.setdefault(expected.format(0, *range(begun + 1, begun + 5)), []).append(rank)
    parts = []
    for expected, ranks in together.items():
        action, _, rest = expected.partition(" ")
        if len(ranks) == 1:
            parts.append(f"rank {ranks[0]} {expected}")
        else:
            many = {"waits": "wait", "is": "are"}[action]
            parts.append(f"ranks {', '.join(map(str, ranks))} {many} {rest}")
    return f"time limit of 2 s: {PARTED.get(name, '')}{'; '.join(parts)}"


@in_forms(*FULL, *OF_FEW)
def test_all_fail_and_the_session_goes_on(run: Run, form: Form) -> None:
    assert run.code == pytest.ExitCode.TESTS_FAILED, run.out
    assert {name for name, end in run.outcomes.items() if end == "passed"} == {"test_well", "test_well_after_all"}, (
        run.out
    )
    assert set(run.outcomes.values()) == {"passed", "failed"}
    others = {"test_another_shape", "test_atexit_on_all", "test_raises_while_the_other_hangs"}
    assert {name for name, end in run.outcomes.items() if end == "failed"} == (
        {*NAMES, *others} if form in FULL else {*FEW}
    )


@pytest.mark.parametrize(("form", "name"), cases(*NAMES), indirect=["form"])
def test_each_hanging_rank_and_its_line_are_named(name: str, run: Run) -> None:
    expected = hanging(name, run)
    if not expected:
        AT_ONCE[name].expect(run, name)
        return
    run.shows(name, headline(name, run))
    assert sorted(run.causes(name)) == list(expected)
    assert not run.consequences(name)
    for rank, (_, functions) in expected.items():
        stack = run.section(name, rank).splitlines()
        pytest.LineMatcher(stack).fnmatch_lines([f"  File *, line * in {function}" for function in functions])


@in_forms(*FULL, *OF_FEW)
def test_hangs_are_reported_soon_after_their_time_limit(run: Run) -> None:
    at_limit = {name: LIMIT for name in run.outcomes if hanging(name, run) or name == "test_atexit_on_all"}
    expect_in_time(run, at_limit)
    # The one that raised waits for the other, which hangs, for 5 s; gloo may not notice another shape.
    own = {"test_raises_while_the_other_hangs": 5.0, "test_another_shape": LIMIT}
    expect_soon(run, {name: own.get(name, 0.0) for name in run.outcomes if name not in at_limit}, 60)


@in_forms(*(form for form in (*FULL, *OF_FEW) if form.reuses_ranks))
def test_faults_happen_on_ranks_that_ran_a_test_before(run: Run) -> None:
    run.shows_used_ranks()


@in_forms(*FULL)
def test_a_collective_of_another_shape(run: Run) -> None:
    # gloo ends the process that gets more than it wants, which is a peer of rank 1; or all wait.
    name, begun = "test_another_shape", run.collectives_before("test_another_shape")
    size = run.world_size or 2
    waits = f"all_reduce (default_pg, #{begun + 1}) at *faults_group.py:*"
    others = [f"rank {rank}" for rank in range(size) if rank != 1]
    if run.lines(name)[0].startswith("time limit"):
        which = "ranks 0, 1 wait" if size == 2 else "ranks 0, 1, 2, 3 wait"
        run.shows(name, f"time limit of 2 s: different tensors: {which} in {waits}")
        shapes = "; ".join(f"rank {rank} all_reduce of Float[[]{2**20 if rank == 1 else 2}[]]" for rank in range(size))
        run.shows(name, "*", f"different tensors at #{begun + 1} of default_pg: {shapes}")
    else:
        assert run.lines(name)[0] in {f"{rank} was killed by SIGABRT" for rank in others}
        (cause,) = run.causes(name)
        assert run.consequences(name) == set(range(size)) - {cause}


@in_forms(*FULL)
def test_the_report_shows_where_ranks_diverge(run: Run) -> None:
    for name, number, kind, usual, other in (
        ("test_another_collective", 1, "collectives", "all_reduce of Float[2]", "broadcast of Long[1]"),
        ("test_other_tensors", 1, "tensors", "all_reduce of Float[2]", "all_reduce of Int[2]"),
    ):
        parts = "; ".join(f"rank {rank} {other if rank == 1 else usual}" for rank in range(run.world_size or 2))
        where = f"#{run.collectives_before(name) + number} of default_pg"
        assert run.lines(name)[2] == f"different {kind} at {where}: {parts}"


@in_forms(*FULL, *OF_FEW)
def test_the_last_collectives_of_each_rank(run: Run) -> None:
    name = "test_each_elsewhere"
    before, size = run.collectives_before(name), run.world_size or SIZES[name]
    # Ranks that live on had others before it, of which the last one is ours, to see that the group is sound.
    ended = f"all_reduce (default_pg, #{before}) of Float[]" if run.shares_ranks else "barrier (default_pg, #1)"
    begun = f"all_reduce (default_pg, #{before + 1}) of Float[2], unfinished"
    # Whatever a rank does: it sleeps, it is in a loop, it holds the GIL, it waits.
    for rank in range(size):
        expected = f"{ended}; {begun}" if rank == size - 1 else ended
        (line,) = [line for line in run.section(name, rank).splitlines() if line.startswith("last collectives: ")]
        assert line.endswith(expected) if run.shares_ranks else line == f"last collectives: {expected}"


@in_forms(*FULL)
def test_a_hang_at_exit_of_all_ranks(run: Run) -> None:
    name, all_ranks = "test_atexit_on_all", list(range(run.world_size or 2))
    run.shows(name, f"time limit of 2 s: ranks {', '.join(map(str, all_ranks))} {ASLEEP.replace('is', 'are', 1)}")
    assert sorted(run.causes(name)) == all_ranks
    assert "fall_asleep" in "\n".join(run.lines(name))


@in_forms(*FULL)
def test_a_hanging_rank_does_not_hide_an_exception(run: Run) -> None:
    Expected((1,), "rank 1 failed: ValueError: the cause", ("consequences:", "  rank 0 *")).expect(
        run, "test_raises_while_the_other_hangs"
    )


@in_forms(*FULL, *OF_FEW)
def test_no_process_file_or_lease_remains(run: Run) -> None:
    assert run.shares_ranks or not run.leftovers_by_test
    assert not run.leftovers
