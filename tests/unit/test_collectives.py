"""Where ranks of a hang are, from stacks as faulthandler writes them and records as torch's flight recorder writes them."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.launch.forensics.collectives import (
    WaitState,
    describe_wait_states,
    first_mismatch,
    read_wait_state,
)
from pytest_distcompat.launch.forensics.flight_recorder import END
from pytest_distcompat.launch.forensics.stacks import Frame
from pytest_distcompat.launch.forensics.stalled_ranks import in_torch

PACKAGES = sysconfig.get_path("purelib")
STANDARD = sysconfig.get_path("stdlib")
C10D = f'  File "{PACKAGES}/torch/distributed/distributed_c10d.py", line 30 in'
WRAPPER = f'  File "{PACKAGES}/torch/distributed/c10d_logger.py", line 83 in wrapper'
BELOW = '  File "a/pytest_distcompat/launch/rank.py", line 9 in main\n  File "b.py", line 1 in start'


@dataclass
class Rank:
    """Return the record that one rank leaves."""

    record: str = ""

    def recorded(self, *entries: dict[str, Any]) -> None:
        dated = []
        for time, operation in enumerate(entries):
            dated.append({**operation, "time_created_ns": time})
        # The ring of the recorder need not begin with the oldest.
        dated.reverse()
        text = json.dumps({"version": "2.10", "entries": dated})
        self.record = f"{text}\n{END.decode()}"

    def described(self, *frames: str) -> str:
        return self.at(*frames).description()

    def at(self, *frames: str) -> WaitState:
        stack = "\n".join(("Current thread 0x1 (most recent call first):", *frames, BELOW))
        wait_state = read_wait_state(self.record, stack)
        assert wait_state is not None
        return wait_state


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.chdir(tmp_path)
    lines = ("import time", "time.sleep(600)", "x" * 200, "")
    (tmp_path / "train.py").write_text("\n".join(lines), encoding="utf-8")
    return Rank()


def entry(number: int, name: str = "all_reduce", *, group: tuple[str, str] = ("0", "default_pg"), **more: Any) -> Any:
    """One entry as torch 2.13 writes it, done unless said otherwise."""
    return {
        "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "process_group": group, "state": "scheduled",
        "profiling_name": f"gloo:{name}", "input_sizes": [[2]], "input_dtypes": ["Float"], "retired": True, **more,
    }  # fmt: skip


def user(function: str = "step", line: int = 2) -> str:
    return f'  File "{Path.cwd()}/train.py", line {line} in {function}'


def test_a_rank_in_a_collective(rank: Rank) -> None:
    rank.recorded(entry(1), entry(2, retired=False))
    description = rank.described(f"{C10D} all_reduce", WRAPPER, user())
    assert description == "waits in all_reduce (default_pg, #2) at train.py:2"


def test_without_a_recorder_the_stack_names_the_collective(rank: Rank) -> None:
    description = rank.described(f"{C10D} all_reduce", WRAPPER, user())
    assert description == "waits in all_reduce at train.py:2"


def test_an_operation_that_is_made_of_another(rank: Rank) -> None:
    rank.recorded(entry(7, "all_gather", group=("3", "undefined"), retired=False))
    description = rank.described(f"{C10D} all_gather", WRAPPER, f"{C10D} all_gather_object", WRAPPER, user())
    assert description == "waits in all_gather_object (all_gather, group 3, #7) at train.py:2"


@pytest.mark.parametrize("function", ["init_process_group", "new_group", "recv", "monitored_barrier"])
def test_a_wait_outside_of_a_collective_has_no_number(rank: Rank, function: str) -> None:
    rank.recorded(entry(4, retired=False))
    description = rank.described(f"{C10D} {function}", user())
    assert description == f"waits in {function} at train.py:2"


def test_a_rank_that_connects_to_a_store_waits_for_no_rank(rank: Rank) -> None:
    """Nobody hosts the store: perhaps a rank that has left would have, perhaps it is the script's own."""
    connects = f'  File "{PACKAGES}/torch/distributed/rendezvous.py", line 9 in _create_c10d_store'
    wait_state = rank.at(connects, f"{C10D} init_process_group", user())
    assert wait_state.description() == "waits in init_process_group at train.py:2"
    assert wait_state.waiting is False
    stack = f"Current thread 0x1 (most recent call first):\n{connects}\n{user()}"
    assert not in_torch(stack)
    wait_state = rank.at(f"{C10D} _new_process_group_helper", f"{C10D} init_process_group", user())
    assert wait_state.waiting


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("process_group.barrier().wait()", True),
        ("[work.wait() for work in works]", True),
        ("work.wait(", True),
        ("lock.acquire()", False),
        ("assert lock.acquire(), 'wait'  # wait", False),
        ("with waiting:", False),
        ("", False),
    ],
)
def test_a_line_that_calls_wait(tmp_path: Path, line: str, waits: bool) -> None:
    source = tmp_path / "waits.py"
    source.write_text(f"{line}\n", encoding="utf-8")
    assert Frame(str(source), 1, "step").calls_wait is waits


def test_a_receiver_that_nccl_recorded(rank: Rank) -> None:
    receive = entry(0, "recv 0<-1", is_p2p=True, p2p_seq_id=5, retired=False)
    rank.recorded(entry(4), receive)
    description = rank.described(f"{C10D} recv", user())
    assert description == "waits in recv (recv 0<-1, default_pg, #5) at train.py:2"


def test_a_rank_elsewhere(rank: Rank) -> None:
    rank.recorded(entry(1), entry(2))
    assert rank.described(user()) == "is in step at train.py:2: time.sleep(600)"
    assert rank.described(user(line=3)) == f"is in step at train.py:3: {'x' * 80} ..."
    assert rank.described(user(line=99)) == "is in step at train.py:99"


def test_a_collective_that_is_under_way_while_the_rank_is_elsewhere(rank: Rank) -> None:
    rank.recorded(entry(1), entry(2, retired=False))
    description = rank.described(user())
    assert description.endswith("time.sleep(600), with all_reduce (default_pg, #2) unfinished")


def test_torch_that_waits_without_a_call_of_the_users(rank: Rank) -> None:
    rank.recorded(entry(2, retired=False))
    backward = f'  File "{PACKAGES}/torch/autograd/graph.py", line 5 in _engine_run_backward'
    description = rank.described(backward, user())
    assert description == "waits in all_reduce (default_pg, #2) at train.py:2"


def test_what_nccl_has_completed_is_done(rank: Rank) -> None:
    rank.recorded(entry(1, state="completed", retired=False))
    assert "unfinished" not in rank.described(user())


def test_without_a_line_of_the_user_the_innermost_line_is_shown(rank: Rank) -> None:
    description = rank.described(
        f'  File "{STANDARD}/selectors.py", line 1 in select',
        f'  File "{PACKAGES}/torch/utils/data.py", line 2 in get',
        f'  File "{PACKAGES}/accelerate/data.py", line 4 in load',
    )
    assert description == "is in load at accelerate/data.py:4"
    description = rank.described('  File "<string>", line 1 in <module>')
    assert description == "is in <module> at <string>:1"


def test_a_main_thread_that_waits_for_another(rank: Rank) -> None:
    stack = (
        "Thread 0x2 (most recent call first):\n" + user("other") + "\n\n"
        f'Current thread 0x1 (most recent call first):\n  File "{STANDARD}/threading.py", line 1 in _shutdown\n'
    )
    wait_state = read_wait_state(rank.record, stack)
    assert wait_state is not None
    assert wait_state.description() == "is in other at train.py:2: time.sleep(600)"


@pytest.mark.parametrize("stack", ["", f"Current thread 0x1 (most recent call first):\n{BELOW}"])
def test_a_rank_that_never_came_to_anything(rank: Rank, stack: str) -> None:
    assert read_wait_state(rank.record, stack) is None


def test_the_history_is_of_the_last_ones(rank: Rank) -> None:
    sums = [entry(number) for number in range(1, 9)]
    barrier = entry(9, "barrier", input_sizes=[], input_dtypes=[])
    rank.recorded(*sums, barrier)
    text = rank.at(user()).history()
    assert text.startswith("last collectives: all_reduce (default_pg, #5) of Float[2]; ")
    assert text.endswith("; barrier (default_pg, #9)")


def test_a_group_that_was_made_again_begins_anew(rank: Rank) -> None:
    rank.recorded(entry(1), entry(2, "broadcast"), entry(1, "barrier"))
    (operation,) = rank.at(user()).recorded
    assert operation.name == "barrier"


def test_a_record_half_written_is_no_record(rank: Rank) -> None:
    rank.record = '{"entries": [{"collective_se'
    assert rank.at(user()).recorded == ()


def test_ranks_at_one_place_are_grouped(rank: Rank) -> None:
    waits = rank.at(f"{C10D} barrier", user())
    sleeps = rank.at(user())
    assert describe_wait_states({0: waits, 1: sleeps, 2: waits, 3: None}) == (
        "ranks 0, 2 wait in barrier at train.py:2; rank 1 is in step at train.py:2: time.sleep(600); rank 3 gave no stack"
    )
    assert describe_wait_states({0: None, 2: None}) == "ranks 0, 2 still running"


def test_many_places_are_cut(rank: Rank) -> None:
    states: dict[int, WaitState | None] = {}
    for number in range(6):
        states[number] = rank.at(user(line=10 + number))
    text = describe_wait_states(states)
    assert text.endswith("rank 3 is in step at train.py:13; ranks 4, 5 elsewhere")


@pytest.mark.parametrize(
    ("second", "what", "where"),
    [
        (entry(3, "broadcast"), "different collectives", "rank 0 all_reduce of Float[2]; rank 1 broadcast of Float[2]"),
        (
            entry(3, input_sizes=[[4, 1]]), "different tensors",
            "rank 0 all_reduce of Float[2]; rank 1 all_reduce of Float[4,1]",
        ),
        (entry(3), "", ""),
        # Of one rank only, or of another group whose description is the same.
        (entry(4, "broadcast"), "", ""),
        (entry(3, "broadcast", group=("9", "default_pg")), "", ""),
    ],
)  # fmt: skip
def test_the_diverging_collective_is_found(second: dict[str, Any], what: str, where: str, rank: Rank) -> None:
    other = Rank()
    rank.recorded(entry(2), entry(3, retired=False))
    other.recorded(entry(2), second)
    first_state = rank.at(user())
    second_state = other.at(user())
    mismatch = first_mismatch({0: first_state, 1: second_state, 2: None})
    if not what:
        assert mismatch is None
        return
    assert mismatch is not None
    assert mismatch.kind == what
    assert str(mismatch) == f"{what} at #3 of default_pg: {where}"


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter"])
def test_tensors_that_may_differ(rank: Rank, name: str) -> None:
    other = Rank()
    rank.recorded(entry(1, name))
    other.recorded(entry(1, name, input_sizes=[], input_dtypes=[]))
    states: dict[int, WaitState | None] = {0: rank.at(user()), 1: other.at(user())}
    assert first_mismatch(states) is None


@pytest.mark.parametrize("standard", ["/opt/other/lib/python3.13", "/opt/other/lib64/python3.14t"])
def test_the_standard_library_of_another_python_is_not_the_users_code(rank: Rank, standard: str) -> None:
    """A script may be started by a Python of its own."""
    at = rank.at(f'  File "{standard}/threading.py", line 9 in wait', user("train"))
    assert at.frame.where == "train.py:2"


def test_a_script_of_an_installed_package_is_the_users(rank: Rank) -> None:
    """As ``launch("-m", "trl.scripts.sft")`` runs it: the library that waits is not where to look first."""
    gather = f'  File "{PACKAGES}/accelerate/utils/operations.py", line 7 in gather'
    step = f'  File "{PACKAGES}/theirs/trainer.py", line 5 in step'
    train = f'  File "{PACKAGES}/transformers/trainer.py", line 9 in train'
    script = f'  File "{PACKAGES}/theirs/scripts/sft.py", line 3 in <module>'
    runpy = '  File "<frozen runpy>", line 88 in _run_code'
    wait_state = rank.at(gather, step, train, script, runpy)
    assert wait_state.frame.where == "theirs/trainer.py:5"
    wait_state = rank.at(gather, train)
    assert wait_state.frame.where == "accelerate/utils/operations.py:7"
