"""One outcome from all ranks: never weaker than the worst of them, and no mark excuses a crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.launch.forensics.ending import RankEnd
from pytest_distcompat.plugin.marked.merge import merge
from pytest_distcompat.plugin.marked.phase import SKIPPED_ELSEWHERE, XFAILED, Phase
from pytest_distcompat.plugin.marked.subtests import with_subtests

if TYPE_CHECKING:
    from tests.plugin.conftest import FakeRanks

DONE = "done"
SKIPPED = Phase("call", "skipped", "no need", "test_x.py:3: Skipped: no need", ("test_x.py", 3, "Skipped: no need"))
MARKS = """
import pytest
pytestmark = pytest.mark.distcompat(world_size=2)

def test_unmarked(): pass

@pytest.mark.xfail(reason="known")
def test_xfail(): pass

@pytest.mark.xfail(reason="known", strict=True)
def test_strict(): pass

@pytest.mark.xfail(reason="known", raises=ValueError)
def test_raises(): pass
"""


def rank(number: int, status: str = DONE, message: str = "", *, kind: str = "", time: float = 0.0) -> RankEnd:
    return RankEnd(number, status, message, kind=kind, time=time, text=f"story of rank {number}")


def failed(number: int, message: str = "ValueError: no", time: float = 1.0) -> RankEnd:
    return rank(number, "raised", f"raised failed: {message}", kind="failed", time=time)


def xfailed(number: int, time: float = 1.0) -> RankEnd:
    return rank(number, "raised", "raised xfailed: known", kind=XFAILED, time=time)


def skipped_alone(number: int) -> RankEnd:
    message = "raised skipped (no need) while other ranks went on"
    return rank(number, "raised", message, kind=SKIPPED_ELSEWHERE, time=1.0)


def test_all_pass(ranks: FakeRanks) -> None:
    ending = ranks.well(4)
    outcome = merge(ending)
    assert outcome.kind == "passed"
    assert outcome.text == ""
    assert not outcome.hard


def test_one_fails(ranks: FakeRanks) -> None:
    stopped = rank(0, "stopped", "was killed by SIGTERM")
    ending = ranks.ending((stopped, ()), (failed(1), ()))
    outcome = merge(ending)
    assert outcome.kind == "failed"
    assert not outcome.hard
    assert outcome.text.splitlines()[0] == "rank 1 failed: ValueError: no"
    assert "story of rank 1" in outcome.text
    assert "consequences:\n  rank 0 was killed by SIGTERM" in outcome.text


def test_all_skip(ranks: FakeRanks) -> None:
    phases = ranks.phases(call=SKIPPED)
    ending = ranks.ending((rank(0), phases), (rank(1), phases))
    outcome = merge(ending)
    assert outcome.kind == "skipped"
    assert outcome.text == "no need"
    assert outcome.location == SKIPPED.location


def test_some_skip_and_the_others_pass(ranks: FakeRanks) -> None:
    passed = (rank(0), ranks.phases())
    skipped = (rank(1), ranks.phases(call=SKIPPED))
    ending = ranks.ending(passed, skipped)
    outcome = merge(ending)
    assert outcome.kind == "failed"
    assert outcome.text == "ranks disagree: rank 0 passed; rank 1 skipped (no need)"
    ending = ranks.ending(passed, (skipped_alone(1), [SKIPPED]))
    outcome = merge(ending)
    assert outcome.kind == "failed"
    assert outcome.text.splitlines()[0] == "rank 1 skipped (no need) while other ranks went on"


def test_one_skips_and_one_fails(ranks: FakeRanks) -> None:
    ending = ranks.ending((skipped_alone(0), [SKIPPED]), (failed(1, time=2.0), ()))
    outcome = merge(ending)
    assert outcome.kind == "failed"
    assert "rank 1: failed: ValueError: no" in outcome.text


def test_xfail_on_all_or_on_some(ranks: FakeRanks) -> None:
    others = (
        xfailed(0),
        rank(0),
        rank(0, "stopped"),
        rank(0, "lost peer"),
        skipped_alone(0),
    )
    for other in others:
        ending = ranks.ending((other, ranks.phases()), (xfailed(1), ()))
        outcome = merge(ending)
        assert outcome.kind == "xfailed", other
        assert outcome.text == "known", other


@pytest.mark.parametrize("status", ["killed", "exited", "missing", "stuck"])
@pytest.mark.parametrize("first", [True, False], ids=["crash first", "xfail first"])
def test_xfail_on_one_does_not_hide_a_crash_of_another(status: str, first: bool, ranks: FakeRanks) -> None:
    # The others end at 1.
    time = 0.5 if first else 1.5
    crashed = rank(0, status, "is gone", time=time)
    for other in (xfailed(1), failed(1)):
        ending = ranks.ending((crashed, ()), (other, ()))
        outcome = merge(ending)
        assert outcome.kind == "failed"
        assert outcome.hard


def test_a_strict_xpass_on_all_ranks_outweighs_an_xfail_in_a_teardown(ranks: FakeRanks) -> None:
    strict = Phase("call", "passed", "", "[XPASS(strict)] known")
    down = Phase("teardown", "xfailed", "known")
    unexpected = ranks.phases(call=strict)
    unexpected_then_xfailed = ranks.phases(call=strict, teardown=down)
    done = ranks.ending((rank(0), unexpected_then_xfailed), (rank(1), unexpected))
    stopped = ranks.ending((xfailed(0), unexpected_then_xfailed), (rank(1, "stopped"), unexpected))
    for ending in (done, stopped):
        outcome = merge(ending)
        assert outcome.kind == "passed"
        assert outcome.text == "[XPASS(strict)] known"
    expected = ranks.phases(call=Phase("call", "xfailed", "known"))
    mixed = merge(ranks.ending((rank(0), expected), (rank(1), unexpected)))
    assert mixed.kind == "xfailed"
    assert mixed.text == "known"


def test_a_hang_is_hard_and_so_is_a_launch_that_failed(ranks: FakeRanks) -> None:
    stuck = (rank(0, "stuck"), ())
    ending = ranks.ending(stuck, (xfailed(1), ()), timed_out=True, timeout=3)
    hung = merge(ending)
    assert hung.kind == "failed"
    assert hung.hard is True
    ending = ranks.ending(stuck, (rank(1), ranks.phases()), timed_out=True, timeout=3)
    hung = merge(ending)
    assert hung.text.splitlines()[0] == "time limit of 3 s: rank 0 still running"
    ending = ranks.ending((rank(0, "missing"), ()), launch_error="Traceback\nOSError: no")
    dead = merge(ending)
    assert dead.kind == "failed"
    assert dead.hard
    assert dead.text.splitlines()[0] == "the ranks could not be started: OSError: no"


def test_a_rank_that_did_not_run_the_test_is_a_failure(ranks: FakeRanks) -> None:
    for phases in ((), ranks.phases()[:2]):
        ending = ranks.ending((rank(0), ranks.phases()), (rank(1), phases))
        outcome = merge(ending)
        assert outcome.kind == "failed"
        assert outcome.hard
        assert outcome.text == "rank 1 ended without running the test to its end"


def test_output_of_all_ranks_has_sections_of_its_own(ranks: FakeRanks) -> None:
    sections = (("Captured stdout call", "hello"),)
    phases = ranks.phases(teardown=Phase("teardown", "passed", sections=sections))
    without_words = RankEnd(0, DONE, output="  \n")
    with_words = RankEnd(1, DONE, output="from C\n")
    ending = ranks.ending((without_words, phases), (with_words, phases))
    outcome = merge(ending)
    assert dict(outcome.sections) == {
        "Captured stdout call (rank 0)": "hello",
        "Captured stdout call (rank 1)": "hello",
        "Uncaptured output (rank 1)": "from C\n",
    }


def test_properties_are_those_of_all_ranks_each_once(ranks: FakeRanks) -> None:
    def phases(*properties: tuple[str, int]) -> tuple[Phase, ...]:
        return tuple(Phase(when, "passed", properties=properties) for when in ("setup", "call", "teardown"))

    of_rank_0 = phases(("same", 1), ("who", 0))
    of_rank_1 = phases(("same", 1), ("who", 1), ("alone", 2))
    ending = ranks.ending((rank(0), of_rank_0), (rank(1), of_rank_1))
    outcome = merge(ending)
    assert outcome.properties == (("same", 1), ("who", 0), ("who (rank 1)", 1), ("alone (rank 1)", 2))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([rank(0), rank(1)], {"passed": 1, "xpassed": 2, "failed": 1}),
        ([xfailed(0), xfailed(1)], {"xfailed": 4}),
        # The marks are the ranks' business: what they did not report as expected is not.
        ([rank(0), failed(1)], {"failed": 4}),
        ([rank(0), rank(1, "killed", "was killed by SIGKILL")], {"failed": 4}),
        ([xfailed(0, 1.0), rank(1, "killed", "was killed by SIGKILL", time=2.0)], {"failed": 4}),
        ([rank(0, "stuck"), rank(1, "stuck")], {"failed": 4}),
        ([rank(0), skipped_alone(1)], {"failed": 4}),
    ],
    ids=["pass", "xfail", "fail", "crash", "crash after xfail", "hang", "skip"],
)
def test_xfail_marks_of_the_parent(
    ends: list[RankEnd], expected: dict[str, int], pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    pytester.makepyfile(MARKS)
    reported: list[tuple[RankEnd, tuple[Phase, ...]]] = []
    for end in ends:
        phases = ranks.phases() if end.status == DONE else ()
        reported.append((end, phases))
    timed_out = any(end.status == "stuck" for end in ends)
    ranks.answer = lambda request: ranks.ending(*reported, timed_out=timed_out)
    counts = pytester.runpytest_inprocess().parseoutcomes()
    assert counts == expected


@pytest.mark.parametrize(("args", "warnings_"), [([], 1), (["-W", "error"], 1), (["-W", "ignore"], 0)])
def test_a_notice_is_a_warning_and_never_an_error(
    args: list[str], warnings_: int, pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    pytester.makepyfile(MARKS)
    ending = ranks.ending((rank(0), ranks.phases()), (failed(1), ()), notice="what is to be known")
    ranks.answer = lambda request: ending
    result = pytester.runpytest_inprocess("-k", "unmarked", *args)
    result.assert_outcomes(failed=1, warnings=warnings_)
    result.stdout.fnmatch_lines(["rank 1 failed: ValueError: no"])
    assert result.stdout.str().count("DistcompatWarning: what is to be known") == warnings_


def test_a_strict_mark_that_a_rank_added_is_not_lost(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(MARKS)
    unexpected = ranks.phases(call=Phase("call", "passed", text="[XPASS(strict)] added"))
    ending = ranks.ending((rank(0), ranks.phases()), (rank(1), unexpected))
    ranks.answer = lambda request: ending
    result = pytester.runpytest_inprocess("-k", "unmarked")
    result.assert_outcomes(failed=1)
    # pytest 8 gives no reason that is a text.
    why = " - [[]XPASS(strict)[]] added" if pytest.version_tuple >= (9,) else ""
    result.stdout.fnmatch_lines(["[[]XPASS(strict)[]] added", f"FAILED *::test_unmarked{why}"])


ASSERTS = Phase("call", "failed", "assert 1 == 2", assertion=True)
RAISES = Phase("call", "failed", "ValueError: no")


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((ASSERTS, ASSERTS), True),
        ((ASSERTS, None), True),
        ((ASSERTS, RAISES), False),
        ((RAISES, None), False),
    ],
    ids=["all", "others stopped", "mixed", "none"],
)
def test_a_failure_by_assertions_alone_is_an_assertion(
    calls: tuple[Phase | None, ...], expected: bool, ranks: FakeRanks
) -> None:
    reported: list[tuple[RankEnd, list[Phase]]] = []
    for number, call in enumerate(calls):
        if call is None:
            reported.append((rank(number, "stopped"), []))
        else:
            reported.append((failed(number, call.message), [call]))
    ending = ranks.ending(*reported)
    outcome = merge(ending)
    assert isinstance(outcome.failure("text"), AssertionError) is expected


def test_a_crash_beside_an_assertion_is_none(ranks: FakeRanks) -> None:
    crashed = rank(1, "killed", "was killed by SIGKILL")
    ending = ranks.ending((failed(0), [ASSERTS]), (crashed, ()))
    outcome = merge(ending)
    assert not isinstance(outcome.failure("text"), AssertionError)


FAILING = """
import pytest
pytestmark = pytest.mark.distcompat(world_size=2)

def test_asserts(rank): assert rank == 5

def test_calls_fail(): pytest.fail("no")

def test_raises(): raise ValueError("no")

"""


@pytest.mark.spawn
def test_ranks_say_whether_they_failed_by_an_assertion(pytester: pytest.Pytester) -> None:
    # What a reporter such as Allure sees, in pytest's own process.
    pytester.makeconftest(
        "import os, pathlib\n"
        "def pytest_exception_interact(node, call):\n"
        "    if 'RANK' not in os.environ:\n"
        "        with pathlib.Path('said').open('a') as file:\n"
        "            print(node.name, isinstance(call.excinfo.value, AssertionError), file=file)\n"
    )
    pytester.makepyfile(FAILING)
    pytester.runpytest_subprocess("-p", "no:randomly")
    said = (pytester.path / "said").read_text(encoding="utf-8")
    assert said.splitlines() == [
        "test_asserts True",
        "test_calls_fail True",
        "test_raises False",
    ]


@pytest.mark.parametrize("other", [True, False])
def test_subtests_that_assert_fail_their_test_by_assertions(other: bool) -> None:
    parts = [
        Phase("call", "failed", "no", subtest="[a]", assertion=True),
        Phase("call", "failed", "no", subtest="[b]", assertion=other),
    ]
    phase = with_subtests(Phase("call", "passed"), parts)
    assert phase.assertion is other
