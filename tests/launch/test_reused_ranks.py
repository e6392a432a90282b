"""Ranks that live on: request after request as if each had ranks of its own, and an end to them where that cannot be had."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.launch.conftest import notes
from tests.launch.state_changes import CHANGES

from pytest_distcompat.ext.reuse.keeper import LEFT, RankKeeper
from pytest_distcompat.ext.reuse.plugin import pytest_distcompat_preload
from pytest_distcompat.ext.reuse.reused_ranks import Reuse
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.warm import WarmLauncher

pytestmark = pytest.mark.spawn

#: Runs ``reused_bodies:<body>`` on ranks that may be those of the request before.
Send = Callable[..., Ending]


@pytest.fixture(scope="module")
def launcher() -> Iterator[WarmLauncher]:
    modules = ("torch", "torch.distributed", "torch.utils.checkpoint", "torch._inductor.config", "numpy.polynomial")
    launcher = WarmLauncher(Warmth(modules=(*modules, *pytest_distcompat_preload())))
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def keeper(launcher: WarmLauncher) -> RankKeeper:
    return RankKeeper(launcher, pytest.fail)


@pytest.fixture
def send(launcher: WarmLauncher, keeper: RankKeeper, tmp_path: Path, importable: None) -> Iterator[Send]:
    endings: list[Ending] = []

    def send(body: str, world_size: int = 2, *, timeout: float = 30.0, keep: Any = (), **payload: Any) -> Ending:
        where = tmp_path / str(len(endings))
        module = "" if ":" in body else "reused_bodies:"
        request = Request(f"{module}{body}", payload, world_size, str(where), timeout)
        if keep is None:
            keeper.retire()
            endings.append(launcher.run(request))
        else:
            reuse = Reuse(**{"scope": f"{world_size}", "uses": 100, **dict(keep)})
            endings.append(keeper.run(request, reuse))
        return endings[-1]

    yield send
    assert not keeper.retire()


def left(ending: Ending) -> str:
    """Why its ranks did not stay."""
    return ending.properties.get(LEFT, "")


def reported(ending: Ending, event: str, key: str) -> list[Any]:
    assert ending.kind == "ok", ending.text()
    return [note[key] for note in notes(ending, event)]


def test_requests_share_ranks(send: Send, keeper: RankKeeper) -> None:
    first, second = (reported(send("report_process"), "seen", "pid") for _ in range(2))
    assert first == second
    assert len(set(first)) == 2
    assert keeper.scope == "2"


@pytest.mark.parametrize(
    "then",
    [{"keep": {"scope": "another"}}, {"keep": None}, {"world_size": 3}],
    ids=["another scope", "ranks of its own", "another world size"],
)
def test_requests_of_other_kinds_do_not_share_ranks(send: Send, then: dict[str, Any]) -> None:
    first = reported(send("report_process"), "seen", "pid")
    other = reported(send("report_process", **then), "seen", "pid")
    again = reported(send("report_process"), "seen", "pid")
    assert not set(first) & set(other)
    assert not set(again) & {*first, *other}


def test_the_last_request_ends_shared_ranks(send: Send, keeper: RankKeeper) -> None:
    first = reported(send("report_process"), "seen", "pid")
    assert reported(send("report_process", keep={"last": True}), "seen", "pid") == first
    assert not keeper.scope


def test_ranks_end_after_the_reuse_limit(send: Send) -> None:
    endings = [send("report_process", keep={"uses": 3}) for _ in range(4)]
    pids = [reported(ending, "seen", "pid") for ending in endings]
    assert pids[0] == pids[1] == pids[2] != pids[3]
    assert [left(ending) for ending in endings] == ["", "", "they did 3 requests", ""]


def test_each_request_has_the_current_environment(send: Send, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    usual = send("report_process")
    before = reported(usual, "seen", "environ")
    with monkeypatch.context() as patch:
        patch.setenv("OF_THIS_MOMENT", "1")
        patch.chdir(tmp_path / "elsewhere")
        ending = send("report_process")
    assert {environ["OF_THIS_MOMENT"] for environ in reported(ending, "seen", "environ")} == {"1"}
    assert set(reported(ending, "seen", "cwd")) == {str(tmp_path / "elsewhere")}
    after = send("report_process", keep={"last": True})
    assert reported(after, "seen", "pid") == reported(usual, "seen", "pid")
    assert reported(after, "seen", "environ") == before


def test_each_request_draws_its_own_random_numbers(send: Send) -> None:
    drawn = [
        tuple(numbers) for _ in range(3) for numbers in reported(send("report_process", seed=0), "seen", "numbers")
    ]
    for kind in zip(*drawn, strict=True):
        assert len(set(kind)) == 6


def test_a_process_group_may_be_made_again_and_again(send: Send, keeper: RankKeeper) -> None:
    assert [reported(send("own_group"), "sum", "value") for _ in range(3)] == [[2.0, 2.0]] * 3
    assert keeper.scope


def test_the_shared_group_stays(send: Send) -> None:
    first, second = send("shared_group"), send("shared_group")
    assert reported(first, "sum", "group") == reported(second, "sum", "group")
    assert reported(second, "sum", "value") == [2.0, 2.0]


def test_an_unmatched_collective_ends_shared_ranks(send: Send, keeper: RankKeeper) -> None:
    ending = send("shared_group", half=True)
    assert "the process group" in left(ending), ending.text()
    assert not keeper.scope
    assert reported(send("shared_group"), "sum", "value") == [2.0, 2.0]


@pytest.mark.parametrize(
    "what",
    [
        "a collective of one rank that nobody waits for",
        "collectives that do not fit",
        "destroyed",
        "destroyed on one rank",
        "no torch",
        "no torch on one rank",
    ],
)
def test_a_broken_group_ends_shared_ranks_and_their_request_passes(what: str, send: Send, keeper: RankKeeper) -> None:
    # The limit is that of the request; what is left of its group must not use it up.
    ending = send("corrupt", what=what, timeout=4.0)
    assert ending.kind == "ok", ending.text()
    assert "the process group" in left(ending), left(ending)
    assert not keeper.scope
    assert reported(send("shared_group"), "sum", "value") == [2.0, 2.0]


def test_a_group_that_cannot_be_destroyed_fails_the_request_soon(send: Send) -> None:
    assert send("corrupt", what="a group below it").kind == "ok"
    ending = send("no_group")
    assert "an earlier test left a collective unfinished" in ending.headline(), ending.text()
    assert ending.seconds < 10


def test_a_group_that_cannot_be_destroyed_at_the_end_is_no_failure(send: Send, keeper: RankKeeper) -> None:
    assert send("corrupt", what="a group below it").kind == "ok"
    assert not keeper.retire()


def test_a_failure_between_requests_is_reported(send: Send) -> None:
    ending = send("break_randomness", keep={"last": True})
    assert "rank 0 raised ZeroDivisionError" in ending.headline(), ending.text()


def test_the_end_of_shared_ranks_has_the_time_limit_of_the_last_request(send: Send, keeper: RankKeeper) -> None:
    send("sleep_at_end", timeout=1.0)
    began = time.monotonic()
    assert "time limit of 1 s" in keeper.retire()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=() if index % 8 == 0 else pytest.mark.nightly) for index, what in enumerate(CHANGES)],
)
def test_changed_state_ends_shared_ranks_and_is_named(what: str, send: Send, keeper: RankKeeper) -> None:
    if what.startswith("accelerate"):
        pytest.importorskip("accelerate")
    first = send("report_process")
    ending = send("state_changes:change", what=what)
    assert ending.kind == "ok", ending.text()
    assert left(ending).startswith("on rank 1 it left "), left(ending)
    assert what.partition(":")[0] in left(ending)
    assert not keeper.scope
    assert not set(reported(send("report_process"), "seen", "pid")) & set(reported(first, "seen", "pid"))


def test_library_settings_are_compared_after_the_request_that_imports_it(send: Send) -> None:
    pytest.importorskip("accelerate")
    # Whether these are the library's own, or what the request made of them, nobody knows.
    endings = [send("imports", level=level) for level in (10, 10, 20)]
    assert [left(ending).partition(" it left ")[2] for ending in endings] == [
        "",
        "",
        "the log level of accelerate (20 instead of 10) changed",
    ]
    pids = [reported(ending, "seen", "pid") for ending in endings]
    assert pids[0] == pids[1] == pids[2]


@pytest.mark.parametrize(
    ("acts", "kind", "headline"),
    [
        ({"0": "return", "1": "ValueError"}, "raised", "rank 1 raised ValueError: boom on 1"),
        ({"0": "sleep", "1": "SIGKILL"}, "crashed", "rank 1 was killed by SIGKILL"),
        ({"0": "os._exit 0", "1": "sleep"}, "crashed", "rank 0 exited with code 0 without a report"),
        ({"0": "os._exit 0", "1": "os._exit 0"}, "crashed", "rank [01] exited with code 0 without a report"),
        ({"0": "sys.exit 3", "1": "wait"}, "raised", "rank 0 raised SystemExit: 3"),
    ],
)
def test_a_failure_is_reported_and_ends_shared_ranks(
    acts: dict[str, str], kind: str, headline: str, send: Send, keeper: RankKeeper
) -> None:
    send("report_process")
    ending = send("bodies:act", acts=acts)
    assert ending.kind == kind, ending.text()
    assert fnmatch(ending.headline(), headline), ending.text()
    assert not keeper.scope
    assert send("report_process").kind == "ok"


def test_a_hang_is_named_and_ended(send: Send) -> None:
    send("report_process")
    ending = send("bodies:act", timeout=3.0, acts={"0": "wait", "1": "sleep"})
    assert ending.kind == "hung"
    assert "rank 0 waits in all_reduce" in ending.headline(), ending.text()
    assert "in fall_asleep" in ending.text()
    assert send("report_process").kind == "ok"


def test_output_of_c_code_is_shown_with_its_request(send: Send) -> None:
    send("print_words", words="of the first")
    ending = send("print_words", words="of the second", fail=True)
    assert "of the second" in ending.ranks[0].output
    assert "of the first" not in ending.ranks[0].output


def test_dead_idle_ranks_are_replaced_with_a_notice(send: Send) -> None:
    pids = reported(send("report_process"), "seen", "pid")
    rank = psutil.Process(pids[1])
    rank.kill()
    psutil.wait_procs([rank], 10.0)
    ending = send("report_process")
    assert "between two tests rank 1 was killed by SIGKILL" in ending.notice, ending.text()
    assert reported(ending, "seen", "pid") != pids


def test_a_failure_at_the_end_of_shared_ranks_fails_the_last_request(send: Send) -> None:
    send("at_end")
    ending = send("report_process", keep={"last": True})
    assert ending.headline().endswith("raised KeyError: 'no such fixture'"), ending.text()


def test_a_failure_at_an_unrequested_end_is_reported(send: Send, keeper: RankKeeper) -> None:
    send("at_end")
    assert "KeyError: 'no such fixture'" in keeper.retire()
    assert not keeper.retire()
