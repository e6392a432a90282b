"""One ending from all ranks: what they logged and left, and the exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.events import Action, Error, Excused, Resumed, SnapshotTaken, Start
from pytest_distcompat.launch.files import Files
from pytest_distcompat.launch.forensics import deaths
from pytest_distcompat.launch.forensics.collectives import WaitState
from pytest_distcompat.launch.forensics.conclude import RankProcess
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.forensics.stacks import Frame

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.conftest import Ranks

EXCUSED = Excused("xfail", "xfailed: known", "Traceback ...")
STACK = """Thread 0x1 (most recent call first):
  File "train.py", line 3 in step
  File "site-packages/_pytest/python.py", line 5 in runtest
  File "a/pytest_distcompat/launch/rank.py", line 9 in main
  File "multiprocessing/fork.py", line 1 in start
"""
PEER_GONE = "RuntimeError: [1] recvValue failed: Connection closed by peer [127.0.0.1]:5"


@pytest.mark.parametrize("codes", [(0, 0), (None, None)])
def test_all_ended_well(ranks: Ranks, codes: tuple[int | None, ...]) -> None:
    ranks.started(0, 1)
    ranks.done(0, 1)
    ending = ranks.end(*codes)
    assert ending.failed is False
    assert ending.kind == "ok"
    assert ending.cause is None
    assert ending.headline() == "all ranks ended well"


def test_what_ranks_wrote_is_kept(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.done(1)
    ending = ranks.end(0, 0, seconds=2.0, command="torchrun ...")
    names = [event.name for event in ending.events[1]]
    assert names == ["start", "action", "snapshot", "done"]
    assert ending.seconds == 2.0
    assert ending.command == "torchrun ..."


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_that_failed_first_is_shown_first(ranks: Ranks, first: int) -> None:
    ranks.started(0, 1)
    ranks.raised(first, "ValueError: the cause")
    ranks.raised(1 - first, "KeyError: later")
    ending = ranks.end(1, 1)
    assert ending.kind == "raised"
    assert ending.headline() == f"rank {first} raised ValueError: the cause"
    text = ending.text()
    assert text.index(f"--- rank {first}: raised") < text.index("KeyError: later")


def test_ranks_with_equal_failures_share_a_section(ranks: Ranks) -> None:
    ranks.started(0, 1, 2)
    for rank in (2, 0):
        ranks.raised(rank, "ValueError: the same")
    ranks.raised(1, "KeyError: another")
    text = ranks.end(1, 1, 1).text()
    assert text.startswith("rank 2 raised ValueError: the same\n\n--- ranks 0 and 2: raised ValueError: the same ---\n")
    assert "--- rank 1: raised KeyError: another ---" in text
    assert text.count("--- rank") == 2


def test_ranks_whose_failures_differ_in_addresses_alone_share_a_section(ranks: Ranks) -> None:
    ranks.started(0, 1)
    for rank, address in enumerate(("0x7fd053081dd0", "0x7f6340d00f10")):
        ranks.raised(rank, f"ValueError: wrong\ngroup = <ProcessGroup object at {address}>")
    text = ranks.end(1, 1).text()
    assert "--- ranks 0 and 1: raised ValueError: wrong ---" in text
    assert text.count("0x7fd053081dd0") + text.count("0x7f6340d00f10") == 2, "message and traceback of one rank"


def test_a_rank_that_lost_its_peer_is_folded_even_if_it_reported_first(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.raised(0, PEER_GONE, lost=True)
    ranks.raised(1, "ValueError: the cause")
    ending = ranks.end(1, 1)
    assert ranks.statuses(ending) == ["lost peer", "raised"]
    assert ending.headline() == "rank 1 raised ValueError: the cause"
    assert ending.text().endswith(f"consequences:\n  rank 0 raised {PEER_GONE}")


@pytest.mark.parametrize(
    "message", ["ConnectionRefusedError: [Errno 111] Connection refused", "AssertionError: Broken pipe", PEER_GONE]
)
def test_a_message_alone_makes_no_lost_peer(message: str, ranks: Ranks) -> None:
    """The rank that raised decides."""
    ranks.started(0, 1)
    ranks.raised(1, message)
    ranks.raised(0, "AssertionError: rank 1 gave no data")
    ending = ranks.end(1, 1)
    assert ranks.statuses(ending) == ["raised", "raised"]
    assert ending.headline() == f"rank 1 raised {message}"


def test_a_skipped_rank_that_waits_is_ended_with_the_others(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    ending = ranks.end(-9, -9, ended_by_us=[0, 1])
    assert ranks.statuses(ending) == ["raised", "stopped"]
    assert ending.kind == "raised"
    assert ending.ranks[0].kind == "xfail"
    assert "rank 1 waited for ranks that had left the test" in ending.text()


@pytest.mark.parametrize(("code", "status"), [(-15, "raised"), (None, "raised"), (-9, "killed"), (0, "exited")])
def test_a_skipped_rank_that_dies_by_itself_crashed(code: int | None, status: str, ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    ranks.raised(1, "ValueError: another one")
    assert ranks.statuses(ranks.end(code, 1)) == [status, "raised"]


def test_no_rank_lost_a_skipped_rank_that_still_waits(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    ranks.raised(1, "DistNetworkError: Connection refused", lost=True)
    ranks.wrote(0, Error("xfail", "xfailed: known", "Traceback ..."))
    ending = ranks.end(1, 1)
    assert ranks.statuses(ending) == ["raised", "raised"]


def test_a_skipped_rank_is_a_lost_peer_after_its_exit(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    ranks.wrote(0, Error("xfail", "xfailed: known", "Traceback ..."))
    ranks.raised(1, PEER_GONE, lost=True)
    assert ranks.statuses(ranks.end(1, 1)) == ["raised", "lost peer"]


@pytest.mark.parametrize(("since", "status"), [(5.5, "lost peer"), (6.5, "raised")])
def test_a_skipped_rank_is_a_lost_peer_after_it_was_killed(since: float, status: str, ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    ranks.raised(1, PEER_GONE, lost=True)
    ending = ranks.end(-9, -9, ended_by_us=[0, 1], ended_since=since)
    assert ranks.statuses(ending) == ["raised", status]


def test_a_skipped_rank_is_lost_by_ranks_whose_connections_were_cut(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    ranks.wrote(1, Error("failed", PEER_GONE, "Traceback ...", lost=True, cut=True))
    assert ranks.statuses(ranks.end(None, None)) == ["raised", "lost peer"]


def test_a_skipped_rank_that_finished_before_the_agent_ends_all(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    ranks.wrote(1, Error("failed", "failed: ValueError: late", "Traceback ..."))
    ranks.wrote(0, Resumed())
    ranks.done(0)
    ending = ranks.end(-15, 1, first=1)
    assert ranks.statuses(ending) == ["raised", "raised"]
    kinds = [end.kind for end in ending.ranks]
    assert kinds == ["xfail", "failed"]


def test_a_skipped_rank_that_continued_counts_again(ranks: Ranks) -> None:
    ranks.started(0, 1)
    for rank in range(2):
        ranks.wrote(rank, EXCUSED)
        ranks.wrote(rank, Resumed())
    ranks.done(1)
    assert ranks.statuses(ranks.end(-15, 0, first=0)) == ["killed", "done"]


@pytest.mark.parametrize(("waits", "kind"), [(True, "raised"), (False, "hung")])
def test_a_hang_that_waits_for_a_skipped_rank(waits: bool, kind: str, ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    inner = '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3 in barrier\n' if waits else ""
    stack = f'Thread 0x1 (most recent call first):\n{inner}  File "/its/train.py", line 3 in step\n'
    ranks.stacked(1, stack)
    ending = ranks.end(-9, -9, timed_out=True, ended_by_us=[0, 1], timeout=5)
    assert ending.kind == kind
    status = "stopped" if waits else "stuck"
    assert ranks.statuses(ending) == ["raised", status]


def test_a_hang_in_a_store_connection_does_not_wait_for_a_skipped_rank(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.wrote(0, EXCUSED)
    torch = '  File "/x/site-packages/torch/distributed'
    frames = f'{torch}/rendezvous.py", line 9 in _create_c10d_store\n{torch}/distributed_c10d.py", line 3 in init_process_group\n'
    stack = f'Thread 0x1 (most recent call first):\n{frames}  File "/its/train.py", line 3 in step\n'
    ranks.stacked(1, stack)
    ending = ranks.end(-9, -9, timed_out=True, ended_by_us=[0, 1], timeout=5)
    assert ending.kind == "hung"
    assert ranks.statuses(ending) == ["raised", "stuck"]
    assert "rank 1: was still running at the time limit" in ending.text()


def test_an_unexplained_lost_peer_is_a_cause(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.raised(1, PEER_GONE, lost=True)
    ranks.raised(0, PEER_GONE, lost=True)
    assert ranks.end(1, 1).headline() == f"rank 1 raised {PEER_GONE}"


def test_a_rank_that_needed_one_that_had_finished_says_so(ranks: Ranks) -> None:
    ranks.started(0, 1, 2)
    ranks.done(1, 2)
    ranks.raised(0, PEER_GONE, lost=True)
    ending = ranks.end(1, 0, 0)
    assert ranks.statuses(ending) == ["raised", "done", "done"]
    assert ending.headline() == f"rank 0 needed ranks 1 and 2, which had finished: it raised {PEER_GONE}"


@pytest.mark.parametrize("started", [True, False])
def test_a_rank_that_had_no_room_for_its_report_says_so(ranks: Ranks, started: bool) -> None:
    if started:
        ranks.started(0, 1, action="save")
    full = "[Errno 28] No space left on device: '/runs'"
    ranks.left = {rank: RankProcess(no_space=full) for rank in range(2)}
    expected = "exited with code 1 without a report during 'save'" if started else "never started (exit code 1)"
    assert ranks.end(1, 1).headline() == f"rank 0 {expected}: {full}"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (-9, "rank 1 was killed by SIGKILL during 'save'"),
        (-11, "rank 1 was killed by SIGSEGV during 'save'"),
        (-60, "rank 1 was killed by signal 60 during 'save'"),
        (3, "rank 1 exited with code 3 without a report during 'save'"),
        # os._exit(0): the process went well, the rank did not.
        (0, "rank 1 exited with code 0 without a report during 'save'"),
        (None, "rank 1 ended without a report during 'save'"),
    ],
)
def test_a_rank_without_a_report_crashed(ranks: Ranks, code: int | None, message: str) -> None:
    ranks.started(0, 1, action="save")
    ranks.printed(1, "terminate called\n")
    ranks.raised(0, PEER_GONE, lost=True)
    ending = ranks.end(1, code)
    assert ending.kind == "crashed"
    assert ending.headline() == message
    assert "last output:\nterminate called" in ending.text()
    assert "consequences:\n  rank 0 raised" in ending.text()


@pytest.mark.parametrize("why", ["the link is cut", "its agent got SIGTERM"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_is_lost_with_its_node_is_a_cause(ranks: Ranks, first: int, why: str) -> None:
    ranks.started(0, 1, 2)
    ranks.left[1] = RankProcess(lost=why, node="n2")
    if first == 0:
        ranks.raised(0, "ValueError: before that")
    ranks.raised(2, PEER_GONE, lost=True)
    ending = ranks.end(1 - first, None, 1, ended_at=(None, 20.0), ended_by_us=[0] * first)
    assert ending.kind == "crashed"
    assert (
        ending.headline()
        == ("rank 0 raised ValueError: before that", f"rank 1 on n2 was lost with its node: {why}")[first]
    )
    assert f"--- rank 1 on n2: was lost with its node: {why} ---" in ending.text()
    assert f"  rank 2 raised {PEER_GONE}" in ending.text().partition("consequences:")[2]


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (
            -9,
            [
                "SIGKILL comes from the out-of-memory killer, a limit of a container or scheduler, or kill -9",
                "the kernel killed 2 processes for lack of memory since the rank started",
                "resident memory of the rank at its last report: 700 MiB",
            ],
        ),
        (
            -7,
            [
                "SIGBUS comes from mapped memory without storage: a full /dev/shm, or a file that was truncated",
                "resident memory of the rank at its last report: 700 MiB",
            ],
        ),
        (-60, []),
    ],
)
def test_a_killed_rank_has_the_usual_causes_of_its_signal(code: int, lines: list[str], ranks: Ranks) -> None:
    ranks.wrote(0, Start(1, oom_kills=5, memory=100 << 20), Action("step", 2, memory=700 << 20))
    assert ranks.end(code, oom_kills=7).ranks[0].text.splitlines() == lines


def test_a_real_process_reads_its_memory_and_the_count_of_kills() -> None:
    assert 10 << 20 < deaths.resident_memory() < 100 << 30
    assert deaths.out_of_memory_kills() >= 0


def test_between_actions_no_action_is_blamed(ranks: Ranks) -> None:
    ranks.started(0)
    ranks.wrote(0, SnapshotTaken("step", 2, {}))
    assert ranks.end(-9).headline() == "rank 0 was killed by SIGKILL"


def test_the_output_shown_is_its_end(tmp_path: Path) -> None:
    path = tmp_path / "logs/none/attempt_0/0/stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(f"line {number}" for number in range(1000)), encoding="utf-8")
    text = Files(tmp_path).output(0)
    assert "line 999" in text
    assert "line 959" not in text


def test_a_reported_exception_needs_no_output(ranks: Ranks) -> None:
    ranks.started(0)
    ranks.printed(0, "warnings")
    ranks.raised(0, "ValueError: x")
    assert "last output" not in ranks.end(1).text()


def test_undecodable_text_is_escaped(ranks: Ranks) -> None:
    ranks.started(0)
    ranks.raised(0, "ValueError: odd \udcff text")
    ending = ranks.end(1)
    assert ending.headline() == "rank 0 raised ValueError: odd \\udcff text"
    assert ending.text().encode()


def test_ranks_that_disagree(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.done(0)
    ranks.raised(1, "AssertionError: 1 != 2")
    ending = ranks.end(0, 1)
    assert ending.failed is True
    assert ending.kind == "raised"
    assert ending.headline() == "rank 1 raised AssertionError: 1 != 2"
    assert ranks.statuses(ending) == ["done", "raised"]


@pytest.mark.parametrize(("code", "how"), [(None, ""), (0, ""), (1, " (exit code 1)"), (-9, " (SIGKILL)")])
def test_a_rank_that_never_started(ranks: Ranks, code: int | None, how: str) -> None:
    ranks.started(0)
    ranks.done(0)
    ranks.printed(1, "ImportError: no torch")
    ending = ranks.end(0, code)
    assert ending.kind == "crashed"
    assert ending.headline() == f"rank 1 never started{how}"
    assert "ImportError: no torch" in ending.text()


def test_the_time_limit_shows_stacks(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.stacked(1, STACK)
    ending = ranks.end(-9, -9, timed_out=True, ended_by_us=[0, 1], timeout=30.0)
    assert ending.kind == "hung"
    assert ending.headline() == "time limit of 30 s: rank 0 gave no stack; rank 1 is in step at train.py:3"
    text = ending.text()
    assert "rank 0: was still running at the time limit during 'step'" in text
    assert 'File "train.py", line 3 in step' in text
    # The way to the rank's own work is the same in every stack.
    assert "fork.py" not in text
    assert "_pytest" not in text
    assert "killed by" not in text


def test_a_rank_that_waits_at_the_end_for_one_that_hangs_is_done(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.done(0)
    ending = ranks.end(-9, -9, timed_out=True, ended_by_us=[0, 1], timeout=0.5)
    assert ending.headline() == "time limit of 0.5 s: rank 1 still running"
    assert ranks.statuses(ending) == ["done", "stuck"]


def test_a_hang_after_all_actions(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.done(0, 1)
    ending = ranks.end(-9, -9, timed_out=True, ended_by_us=[0, 1], timeout=5)
    assert ending.kind == "hung"
    assert "ranks 0 and 1: was still running at the time limit after it had finished its work" in ending.text()


def test_a_crash_explains_the_hang_of_the_others(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ending = ranks.end(-9, -11, timed_out=True, ended_by_us=[0], timeout=5)
    assert ending.kind == "crashed"
    assert ending.headline() == "rank 1 was killed by SIGSEGV during 'step'"
    assert "rank 0: was still running" in ending.text()


def test_the_time_limit_passed_while_the_last_rank_left(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.done(0, 1)
    ending = ranks.end(0, 0, timed_out=True, timeout=5)
    # Either is a sentence; a hang in which all ranks ended well is none.
    assert not ending.failed or "time limit" in ending.headline()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (-11, "rank 1 was killed by SIGSEGV after it had finished its work"),
        (-15, "rank 1 was killed by SIGTERM after it had finished its work"),
        (1, "rank 1 exited with code 1 without a report after it had finished its work"),
    ],
)
def test_a_rank_that_dies_after_its_work_crashed(ranks: Ranks, code: int, message: str) -> None:
    ranks.started(0, 1)
    ranks.done(0, 1)
    ending = ranks.end(0, code)
    assert ending.kind == "crashed"
    assert ending.headline() == message


def test_an_exception_does_not_soften_a_crash_beside_it(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.raised(0, "ValueError: may be an expected one")
    ending = ranks.end(1, -11)
    assert ending.kind == "crashed"
    assert "ValueError: may be an expected one" in ending.text()


def test_sigterm_is_a_consequence_of_anything_else(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.raised(1, "ValueError: the cause")
    ending = ranks.end(-15, 1)
    assert ranks.statuses(ending) == ["stopped", "raised"]
    assert ending.kind == "raised"
    assert ending.text().endswith("consequences:\n  rank 0 was killed by SIGTERM during 'step'")


def test_sigterm_alone_is_a_cause(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.done(1)
    ending = ranks.end(-15, 0)
    assert ending.kind == "crashed"
    assert ending.headline() == "rank 0 was killed by SIGTERM during 'step'"


def test_a_death_without_time_is_not_before_timed_ones(ranks: Ranks) -> None:
    # The agent sees rank 2 gone, and looks no more; ranks 0 and 3 said nothing since they started.
    ranks.started(0, 1, 2, 3)
    ranks.raised(1, "ValueError: first")
    ending = ranks.end(-9, 1, -9, -9, ended_at=(None, None, 100.0, None))
    assert ending.headline() == "rank 1 raised ValueError: first"
    assert ranks.statuses(ending) == ["killed", "raised", "killed", "killed"]


def test_of_two_sigterms_the_first_is_the_cause(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ending = ranks.end(-15, -15, first=1)
    assert ending.headline() == "rank 1 was killed by SIGTERM during 'step'"
    assert ranks.statuses(ending) == ["stopped", "killed"]


@pytest.mark.parametrize(
    ("output", "status"), [(f"terminate called ... {PEER_GONE}", "lost peer"), ("abort", "killed")]
)
def test_an_abort_by_a_lost_peer_is_folded(ranks: Ranks, output: str, status: str) -> None:
    ranks.started(0, 1)
    ranks.printed(0, output)
    ranks.raised(1, "ValueError: the cause")
    assert ranks.statuses(ranks.end(-6, 1)) == [status, "raised"]


def test_a_rank_that_ends_after_the_failure_is_no_cause(ranks: Ranks) -> None:
    # It spoke first and died by SIGKILL, yet only because we ended it.
    ranks.started(0)
    ranks.started(1)
    ending = ranks.end(-9, 0, ended_by_us=[0])
    assert ending.headline() == "rank 1 exited with code 0 without a report during 'step'"
    assert "consequences:\n  rank 0 outlived another rank's failure and was killed" in ending.text()


@pytest.mark.parametrize(
    ("error", "text"),
    [("cannot import x", "cannot import x"), ("Traceback ...\nImportError: y\n", "ImportError: y")],
)
def test_the_launch_itself_failed(error: str, text: str) -> None:
    ending = Ending.not_launched(2, error)
    assert ending.failed is True
    assert ending.kind == "crashed"
    assert ending.headline() == f"the ranks could not be started: {text}"
    assert error.strip() in ending.text()


def test_processes_that_a_rank_leaves_running_are_named(ranks: Ranks) -> None:
    ranks.started(0)
    ranks.raised(0, "ValueError: x")
    ending = ranks.end(1, left_over=("sleep (pid 7)", "sh (pid 8)"))
    assert "left running by a rank, now killed: sleep (pid 7), sh (pid 8)" in ending.text()


#: From harmless to bad: how one rank may end, and the kind of ending that the run then has at least.
WORST = {
    "done": "ok",
    "raised": "raised",
    "exit 0": "crashed",
    "SIGKILL": "crashed",
    "missing": "crashed",
    "stuck": "hung",
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("how", WORST)
def test_never_weaker_than_the_worst_rank(ranks: Ranks, how: str, order: tuple[int, int]) -> None:
    good, bad = order
    ranks.started(good)
    ranks.done(good)
    if how != "missing":
        ranks.started(bad)
    if how == "done":
        ranks.done(bad)
    if how == "raised":
        ranks.raised(bad, "ValueError: x")
    code = {"raised": 1, "SIGKILL": -9, "stuck": -9}.get(how, 0)
    codes = (0, code) if bad else (code, 0)
    if how == "stuck":
        ending = ranks.end(*codes, timed_out=True, ended_by_us=[bad])
    else:
        ending = ranks.end(*codes, timed_out=False, ended_by_us=[])
    assert ending.kind == WORST[how]
    assert ending.failed == (how != "done")
    assert ranks.statuses(ending)[good] == "done"


def test_a_hang_is_not_hidden_by_a_rank_that_gave_up_waiting(ranks: Ranks) -> None:
    ranks.started(0, 1)
    ranks.raised(0, "RuntimeError: Application timeout caused pair closure", lost=True)
    ending = ranks.end(1, -9, timed_out=True, ended_by_us=[1], timeout=5)
    assert ending.kind == "hung"


def test_of_ranks_that_hang_the_one_that_waits_for_others_is_not_the_cause() -> None:
    where = Frame("/its/test.py", 3, "body")
    waits = RankEnd(0, "stuck", time=1.0, wait_state=WaitState(where, waits="all_reduce"))
    asleep = RankEnd(1, "stuck", time=2.0, wait_state=WaitState(where))
    cause = Ending((waits, asleep), {}, timed_out=True).cause
    assert cause == asleep


@pytest.mark.parametrize("ended", [[0, 1], [0]])
def test_an_exception_raised_by_the_stack_request_is_no_cause(ranks: Ranks, ended: list[int]) -> None:
    """A rank that had raised by the time limit is not among those that hang."""
    ranks.started(0, 1)
    ranks.raised(1, "SystemError: returned NULL without setting an exception")
    ending = ranks.end(-9, -9, timed_out=True, ended_by_us=ended)
    assert ending.kind == "hung"
    if 1 in ended:
        assert ranks.statuses(ending) == ["stuck", "stuck"]
        assert "SystemError" not in ending.text()
    else:
        assert ranks.statuses(ending) == ["stuck", "raised"]
        assert "SystemError" in ending.text()
