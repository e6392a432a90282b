"""However a rank ends: the verdict, its cause, its words; nothing is left running, and the next run is fine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.launch.conftest import notes

from pytest_distcompat.events import Note
from pytest_distcompat.launch.forensics import watchdog
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.rank_log import read_events
from pytest_distcompat.launch.torchrun import TorchrunLauncher
from pytest_distcompat.launch.warm import WarmLauncher

if TYPE_CHECKING:
    from tests.launch.conftest import Run

pytestmark = pytest.mark.spawn

#: What each rank does, then: the kind of ending, the rank that is the cause, each rank's status (a consequence is
#: either of ``lost peer`` and ``stopped``), and what the first line says.
FAULTS = {
    "raise": ({1: "ValueError"}, "raised", 1, ("consequence", "raised"), "rank 1 raised ValueError: boom on 1"),
    "raise of 4": ({2: "ValueError"}, "raised", 2, ("consequence", "consequence", "raised", "consequence"), "boom on 2"),
    "raise on both": (
        {0: "TypeError, later", 1: "ValueError"}, "raised", 1, ("raised", "raised"), "rank 1 raised ValueError: boom on 1",
    ),
    "sys.exit 0": ({1: "sys.exit 0"}, "raised", 1, ("consequence", "raised"), "rank 1 raised SystemExit: 0"),
    "sys.exit 3": ({0: "sys.exit 3"}, "raised", 0, ("raised", "consequence"), "rank 0 raised SystemExit: 3"),
    "interrupt": ({1: "interrupt"}, "raised", 1, ("consequence", "raised"), "rank 1 raised KeyboardInterrupt"),
    "speechless": (
        {1: "speechless"}, "raised", 1, ("consequence", "raised"), "rank 1 raised bodies.SpeechlessError: <exception str() failed>",
    ),
    "unpicklable": ({1: "unpicklable"}, "raised", 1, ("consequence", "raised"), "rank 1 raised bodies.HandfulError: hands full"),
    "os._exit 0": ({1: "os._exit 0"}, "crashed", 1, ("consequence", "exited"), "rank 1 exited with code 0 without a report"),
    "os._exit 3": ({0: "os._exit 3"}, "crashed", 0, ("exited", "consequence"), "rank 0 exited with code 3 without a report"),
    "SIGKILL": ({1: "SIGKILL"}, "crashed", 1, ("consequence", "killed"), "rank 1 was killed by SIGKILL"),
    "SIGKILL of 4": ({3: "SIGKILL"}, "crashed", 3, (*["consequence"] * 3, "killed"), "rank 3 was killed by SIGKILL"),
    "SIGSEGV": ({0: "SIGSEGV"}, "crashed", 0, ("killed", "consequence"), "rank 0 was killed by SIGSEGV"),
    "SIGABRT": ({1: "SIGABRT"}, "crashed", 1, ("consequence", "killed"), "rank 1 was killed by SIGABRT"),
    "SIGTERM": ({1: "SIGTERM"}, "crashed", 1, ("consequence", "killed"), "rank 1 was killed by SIGTERM"),
    "close output, raise": ({1: "close output, ValueError"}, "raised", 1, ("consequence", "raised"), "ValueError: boom on 1"),
}  # fmt: skip


def verdict(ending: Ending) -> tuple[str, int, tuple[str, ...]]:
    assert ending.cause is not None, ending.text()
    folded = {"lost peer": "consequence", "stopped": "consequence"}
    return ending.kind, ending.cause.rank, tuple(folded.get(end.status, end.status) for end in ending.ranks)


def in_json(acts: dict[int, str]) -> dict[str, str]:
    return {str(rank): act for rank, act in acts.items()}


@pytest.fixture(autouse=True)
def next_run_is_fine(run: Run) -> object:
    """After every test of this file: the launcher works as if nothing had happened."""
    yield
    ending = run("meet")
    assert ending.kind == "ok", ending.text()
    assert [total["value"] for total in notes(ending, "sum")] == [1.0, 1.0]


@pytest.mark.nightly
def test_the_stack_of_a_rank_that_its_peer_timed_out_on(run: Run) -> None:
    ending = run("act", acts={"0": "wait a second", "1": "sleep in a group"})
    assert "rank 0 raised RuntimeError" in ending.headline(), ending.text()
    assert [end.status for end in ending.ranks] == ["raised", "stopped"]
    _, heading, where = ending.text().partition("where rank 1 was when another one gave up waiting")
    assert heading, ending.text()
    assert "in fall_asleep" in where
    # A failure that says nothing of waiting asks nobody.
    assert "gave up waiting" not in run("act", acts={"0": "ValueError", "1": "sleep"}).text()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_names_the_rank_that_failed_first(run: Run, fault: str) -> None:
    acts, kind, cause, statuses, words = FAULTS[fault]
    ending = run("act", len(statuses), acts=in_json(acts))
    assert verdict(ending) == (kind, cause, statuses), ending.text()
    assert ending.headline().endswith(words)
    assert ending.text().startswith(ending.headline())
    assert not ending.left_over


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault",
    ["raise", *(pytest.param(fault, marks=pytest.mark.nightly) for fault in ("os._exit 0", "SIGTERM", "SIGKILL"))],
)
def test_torchrun_gives_the_same_verdict(run: Run, torchrun: TorchrunLauncher, fault: str) -> None:
    acts, kind, cause, statuses, words = FAULTS[fault]
    ending = run("act", len(statuses), launcher=torchrun, acts=in_json(acts))
    assert verdict(ending) == (kind, cause, statuses), ending.text()
    assert ending.headline().endswith(words)


def test_both_exceptions_are_shown(run: Run) -> None:
    ending = run("act", acts={"0": "TypeError, later", "1": "ValueError"})
    assert "TypeError: bang on 0" in ending.text()
    assert "in _raise_later" in ending.text()
    assert ending.text().index("in _raise_value") < ending.text().index("in _raise_later")


def test_consequences_are_folded_under_the_cause(run: Run) -> None:
    ending = run("act", 4, acts={"3": "ValueError"})
    story, _, consequences = ending.text().partition("consequences:\n")
    assert "--- rank 3: raised ValueError: boom on 3 ---" in story
    assert sorted(line.split()[1] for line in consequences.splitlines()) == ["0", "1", "2"]


@pytest.mark.parametrize("launcher", ["warm", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_a_hang_shows_where_each_rank_is(run: Run, launcher: str, request: pytest.FixtureRequest) -> None:
    # torchrun's ranks import torch within their time.
    seconds = 4.0 if launcher == "warm" else 10.0
    ending = run("act", launcher=request.getfixturevalue(launcher), timeout=seconds, acts={"1": "sleep"})
    assert (ending.kind, [end.status for end in ending.ranks]) == ("hung", ["stuck", "stuck"]), ending.text()
    headline = ending.headline()
    assert headline.startswith(f"time limit of {seconds:g} s: rank 0 ")
    assert "; rank 1 is in fall_asleep at " in headline
    assert "in wait_for_peers" in ending.ranks[0].stack
    assert "in fall_asleep" in ending.ranks[1].stack
    assert "in wait_for_peers" in ending.text()
    assert "in fall_asleep" in ending.text()


@pytest.mark.parametrize(
    ("fault", "kind", "status"), [("ValueError", "raised", "raised"), ("SIGKILL", "crashed", "killed")]
)
def test_a_rank_that_ignores_sigterm_is_no_cause(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: str, kind: str, status: str
) -> None:
    monkeypatch.setattr(watchdog, "FAILED_AFTER", 0.5)
    monkeypatch.setattr(watchdog, "VANISHED_AFTER", 0.5)
    ending = run("act_alone", acts={"0": "deaf", "1": f"{fault}, once 0 is deaf"})
    assert verdict(ending) == (kind, 1, ("consequence", status)), ending.text()
    assert "rank 0 outlived another rank's failure and was killed" in ending.text()


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_that_all_vanish_do_not_keep_the_agent_waiting(run: Run, warm: WarmLauncher, world_size: int) -> None:
    run("meet")
    before = warm._process
    ending = run("act", world_size, acts={"0": "os._exit 0", "1": "os._exit 0"})
    assert (ending.kind, [end.status for end in ending.ranks]) == ("crashed", ["exited"] * world_size)
    assert not ending.timed_out
    assert warm._process is before


@pytest.mark.parametrize("child", ["child", "far child"])
def test_processes_left_running_by_a_rank_are_killed_and_named(run: Run, child: str) -> None:
    ending = run("act", acts={"0": "return", "1": child})
    assert ending.kind == "ok"
    (pid,) = (child["pid"] for child in notes(ending, "child"))
    assert ending.left_over == (f"sleep (pid {pid})",)
    assert f"left running by a rank, now killed: sleep (pid {pid})" in ending.text()


def test_binary_output_changes_no_verdict(run: Run) -> None:
    ending = run("act", acts={"0": "return", "1": "rubbish"})
    assert ending.kind == "ok"
    ending = run("act", acts={"0": "sleep", "1": "rubbish and os._exit 3"})
    assert ending.headline() == "rank 1 exited with code 3 without a report"
    assert "last words \N{REPLACEMENT CHARACTER}" in ending.text()
    assert len(ending.text()) < 100_000


def test_closed_output_changes_no_verdict(run: Run) -> None:
    assert run("act", acts={"0": "close output", "1": "return"}).kind == "ok"


def test_the_launcher_process_is_killed_while_ranks_run(run: Run, warm: WarmLauncher) -> None:
    run("meet")
    before = warm._process
    ending = run("act", acts={"0": "sleep", "1": "kill the launcher"})
    assert ending.kind == "crashed"
    assert ending.headline() == "the launcher process died while ranks ran (SIGKILL)"
    assert run("meet").kind == "ok"
    assert warm._process is not before


@pytest.mark.nightly
def test_the_launcher_process_is_killed_between_runs(run: Run, warm: WarmLauncher) -> None:
    run("meet")
    assert warm._process is not None
    before = warm._process
    os.kill(before._process.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(before._process.pid)], 10.0)
    assert run("meet").kind == "ok"
    assert warm._process is not before


@pytest.mark.nightly
def test_the_fork_server_is_killed_while_ranks_run(run: Run) -> None:
    ending = run("act", acts={"0": "sleep", "1": "kill the fork server"})
    assert ending.kind == "crashed"


OWNER = """
import sys
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.warm import WarmLauncher

launcher = WarmLauncher(Warmth(modules=("torch.distributed",)))
launcher.run(Request("bodies:act", {"acts": {"0": "sleep", "1": "deaf"}}, 2, sys.argv[1]))
"""


@pytest.mark.nightly
def test_all_die_with_the_process_that_owns_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importable: None
) -> None:
    # What a killed process cannot tidy up goes away with this test.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "run")])
    try:
        deadline = time.monotonic() + 60
        while not any(isinstance(event, Note) for event in read_events(tmp_path / "run", 1)):
            assert time.monotonic() < deadline
            assert owner.poll() is None
            time.sleep(0.05)
        below = psutil.Process(owner.pid).children(recursive=True)
        # The launcher process, Python's resource tracker, two fork servers, two ranks.
        assert len(below) == 6
    finally:
        owner.kill()
        owner.wait()
    _, still = psutil.wait_procs(below, timeout=10)
    assert not still
