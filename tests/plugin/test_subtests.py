"""Subtests have reports of their own in the middle of a test: they end nothing, and one that fails makes the test fail."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from tests.plugin.conftest import codes

from pytest_distcompat.launch.forensics.ending import RankEnd
from pytest_distcompat.plugin.marked.merge import merge
from pytest_distcompat.plugin.marked.phase import XFAILED, Phase
from pytest_distcompat.plugin.marked.reports import Phases

if TYPE_CHECKING:
    from tests.plugin.conftest import FakeRanks, Run, RunPytest, Torchrun

ON_RANKS = """
import os, time
import pytest

mark = pytest.mark.distcompat(world_size=2)
shared = pytest.mark.distcompat(world_size=2, reuse="session")
KERNELS = ("eager", "flash", "sdpa")

@mark
def test_passes(subtests):
    for kernel in KERNELS:
        with subtests.test(kernel):
            pass

@mark
def test_skips_one(subtests):
    for kernel in KERNELS:
        with subtests.test(kernel):
            if kernel == "flash":
                pytest.skip("no flash here")

@mark
def test_xfails_in_one_and_fails(subtests):
    with subtests.test("known"):
        pytest.xfail("upstream")
    assert 1 + 1 == 3, "the real failure"

@mark
def test_two_fail(subtests, process_group):
    # Side by side: a failed rank does not wait long for another's own failure.
    for kernel in KERNELS:
        with subtests.test(kernel):
            assert kernel == "flash"

@mark
def test_one_fails_on_rank_1(subtests, rank):
    for number, kernel in enumerate(KERNELS):
        with subtests.test(kernel, number=number):
            print("printed in", kernel)
            assert rank == 0 or kernel != "flash"

@mark
def test_one_fails_and_so_does_the_rest(subtests, rank):
    with subtests.test("first"):
        raise ValueError("of the subtest")
    raise ValueError("of the rest")

@mark
def test_one_fails_and_the_rest_is_skipped(subtests):
    with subtests.test("first"):
        raise ValueError("of the subtest")
    pytest.skip("the rest")

@mark
@pytest.mark.parametrize("then", ["sleeps", "waits"])
def test_one_fails_on_rank_0_and_rank_1_xfails(subtests, process_group, shared_dir, rank, then):
    from torch import distributed
    if rank == 1:
        while not (shared_dir / "failed").exists():
            time.sleep(0.01)
        pytest.xfail("known")
    with subtests.test("first"):
        raise ValueError("unexpected")
    (shared_dir / "failed").touch()
    distributed.barrier() if then == "waits" else time.sleep(60)

@mark
def test_one_loses_its_peer(subtests, process_group, rank):
    from torch import distributed
    if rank == 1:
        raise ValueError("the cause")
    with subtests.test("first"):
        distributed.barrier()

@shared
def test_shared_skips_one(subtests, record_property):
    record_property("pid", os.getpid())
    with subtests.test("first"):
        pytest.skip("not here")

@shared
def test_shared_fails_in_one(subtests, record_property):
    record_property("pid", os.getpid())
    with subtests.test("first"):
        raise ValueError

@shared
def test_shared_after_it(record_property):
    record_property("pid", os.getpid())
"""
PASS = {"test_passes", "test_skips_one", "test_shared_skips_one", "test_shared_after_it"}
#: What the text of a failure shows, in this order.
TEXTS = {
    "test_xfails_in_one_and_fails": ["rank * failed: AssertionError: the real failure"],
    "test_two_fail": [
        "rank ? failed: subtest [[]eager[]]: AssertionError: assert 'eager' == 'flash' (first of 2 failures)",
        "--- ranks 0 and 1: *",
        "--- subtest [[]eager[]] ---",
        '>               assert kernel == "flash"',
        "E               AssertionError: assert 'eager' == 'flash'",
        "--- subtest [[]sdpa[]] ---",
        "E               AssertionError: assert 'sdpa' == 'flash'",
    ],
    "test_one_fails_on_rank_1": [
        "rank 1 failed: subtest [[]flash[]] (number=1): AssertionError: *",
        "--- rank 1: *",
        "consequences:",
        "  rank 0 *",
    ],
    "test_one_fails_and_so_does_the_rest": [
        "rank ? failed: subtest [[]first[]]: ValueError: of the subtest (first of 2 failures)",
        "E*ValueError: of the subtest",
        "--- the test itself ---",
        "E*ValueError: of the rest",
    ],
    "test_one_fails_and_the_rest_is_skipped": ["rank ? failed: subtest [[]first[]]: ValueError: of the subtest"],
    "test_one_fails_on_rank_0_and_rank_1_xfails[sleeps]": [
        "rank 0 failed: subtest [[]first[]]: ValueError: unexpected",
        "E*ValueError: unexpected",
    ],
    "test_one_fails_on_rank_0_and_rank_1_xfails[waits]": [
        "rank 0 failed: subtest [[]first[]]: ValueError: unexpected",
        "E*ValueError: unexpected",
    ],
    "test_one_loses_its_peer": ["rank 1 failed: ValueError: the cause", "consequences:", "  rank 0 *"],
    "test_shared_fails_in_one": ["rank ? failed: subtest [[]first[]]: ValueError"],
}


def show(text: str, *lines: str) -> None:
    pytest.LineMatcher(text.splitlines()).fnmatch_lines(lines)


@pytest.fixture(scope="module")
def on_ranks(run_pytest: RunPytest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("_pytest.subtests", reason="this pytest has no subtests")
    directory = tmp_path_factory.mktemp("subtests")
    (directory / "test_it.py").write_text(ON_RANKS, encoding="utf-8")
    return run_pytest(directory)


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_test_fails_by_its_subtests_and_is_not_skipped_or_excused_by_them(on_ranks: Run) -> None:
    assert on_ranks.outcomes == {**dict.fromkeys(PASS, "passed"), **dict.fromkeys(TEXTS, "failed")}, on_ranks.out
    assert len({(report["nodeid"], report["when"]) for report in on_ranks.reports}) == len(on_ranks.reports)


@pytest.mark.nightly
@pytest.mark.spawn
@pytest.mark.parametrize("name", TEXTS)
def test_each_failed_subtest_is_shown_under_its_rank(name: str, on_ranks: Run) -> None:
    show(on_ranks.text(name), *TEXTS[name])


@pytest.mark.nightly
@pytest.mark.spawn
def test_output_and_skip_reasons_of_subtests_are_shown(on_ranks: Run) -> None:
    printed = on_ranks.sections("test_one_fails_on_rank_1")["Captured stdout call [flash] (number=1) (rank 1)"]
    assert printed == "printed in flash\n"
    for rank in range(2):
        assert on_ranks.sections("test_skips_one")[f"Subtests (rank {rank})"] == "[flash] skipped: no flash here"


@pytest.mark.nightly
@pytest.mark.spawn
def test_shared_ranks_end_after_a_failed_subtest_only(on_ranks: Run) -> None:
    shared = ("test_shared_skips_one", "test_shared_fails_in_one", "test_shared_after_it")
    first, failed, after = (dict(on_ranks.of(name)["properties"])["pid"] for name in shared)
    assert first == failed != after


# Inside a launch.

INSIDE = """
import os, time, unittest
import pytest

RANK = int(os.environ["RANK"])

def test_skips_one_on_both(subtests):
    for kernel in ("eager", "flash"):
        with subtests.test(kernel):
            if kernel == "flash":
                pytest.skip("no flash here")

def test_one_rank_has_more_subtests(subtests):
    if RANK == 0:
        with subtests.test("log"):
            pass

@pytest.mark.distcompat
def test_one_fails_on_rank_1(subtests, process_group):
    with subtests.test("first"):
        assert RANK == 0
    from torch import distributed
    distributed.barrier()

def test_three_fail_on_rank_0(subtests):
    for number in range(3):
        with subtests.test(number=number):
            assert RANK == 1

@pytest.mark.distcompat
def test_one_fails_on_rank_0_and_rank_1_xfails(subtests, process_group):
    from torch import distributed
    if RANK == 1:
        pytest.xfail("known")
    with subtests.test("first"):
        raise ValueError("unexpected")
    distributed.barrier()

class TestCase(unittest.TestCase):
    def test_one_fails_on_rank_1(self):
        with self.subTest("first"):
            assert RANK == 0

@pytest.fixture
def looked_at(subtests):
    with subtests.test("of a fixture"):
        assert RANK == 0

def test_one_fails_in_setup(looked_at):
    raise AssertionError("nobody gets here")

def test_next():
    pass

@pytest.mark.distcompat(timeout=10)
def test_hangs(subtests, process_group):
    from torch import distributed
    with subtests.test("first"):
        pass
    distributed.barrier() if RANK == 0 else time.sleep(3000)

def test_after():
    raise AssertionError("nobody gets here")
"""
#: What the item's own failure shows; None of one that passes.
ENDS: dict[str, list[str] | None] = {
    "test_skips_one_on_both": None,
    "test_one_rank_has_more_subtests": None,
    "test_one_fails_on_rank_1": ["rank 1 failed: subtest [[]first[]]: assert 1 == 0", "*--- rank 1: *", "E *"],
    "test_three_fail_on_rank_0": [
        "rank 0 failed: subtest (number=0): assert 0 == 1 (first of 3 failures)",
        "--- subtest (number=2) ---",
    ],
    "test_one_fails_on_rank_0_and_rank_1_xfails": ["rank 0 failed: subtest [[]first[]]: ValueError: unexpected"],
    "TestCase::test_one_fails_on_rank_1": ["rank 1 failed: subtest [[]first[]]: *"],
    "test_one_fails_in_setup": ["rank 1 failed in setup: subtest [[]of a fixture[]]: assert 1 == 0"],
    "test_next": None,
    "test_hangs": ["time limit of 10 s: rank 0 waits in barrier at *; rank 1 is in test_hangs at *time.sleep(3000)"],
}


@pytest.fixture(scope="module")
def inside(torchrun: Torchrun) -> Run:
    pytest.importorskip("_pytest.subtests", reason="this pytest has no subtests")
    # Six items fail: a rank that counted its subtests too would stop before the others. pytest-rerunfailures raises where
    # a subtest of a fixture fails, in any pytest.
    return torchrun(INSIDE, "--maxfail=7", "-p", "no:rerunfailures")


@pytest.mark.nightly
@pytest.mark.spawn
def test_inside_a_launch_subtests_are_each_ranks_own_and_count_in_their_phase(inside: Run) -> None:
    assert list(inside.outcomes) == list(ENDS), inside.out
    for name, expected in ENDS.items():
        reports = [report for report in inside.reports if report["nodeid"].partition("::")[2] == name]
        # Those of rank 0's subtests come first, and show nothing of ranks.
        failed = [report["text"] for report in reports if "reproduce: " in report["text"]]
        assert len(failed) == (expected is not None), inside.out
        if expected is not None:
            show(failed[0], *expected)
    assert (inside.code, codes(inside)) == (1, {0: 1, 1: 1}), inside.out


# What there is to say of ranks that did not come to the end of the phase.

FAILED = Phase("call", "failed", "ValueError: no", "E   ValueError: no", subtest="[first]")
SKIPPED = Phase("call", "skipped", "not here", subtest="[first]")
DONE = RankEnd(1, "done")


def merged(ranks: FakeRanks, end: RankEnd, *subtests: Phase, other: RankEnd = DONE, **more: Any) -> tuple[str, str]:
    setup, *rest = ranks.phases()
    ending = ranks.ending((end, [setup, *subtests]), (other, [setup, *rest]), **more)
    outcome = merge(ending)
    return outcome.kind, outcome.text


@pytest.mark.parametrize("status", ["stopped", "lost peer"])
def test_a_rank_that_was_stopped_for_anothers_xfail_failed_by_its_subtest(status: str, ranks: FakeRanks) -> None:
    xfailed = RankEnd(1, "raised", "raised xfailed: known", kind=XFAILED, time=1.0)
    end = RankEnd(0, status, "was killed", time=2.0)
    kind, text = merged(ranks, end, FAILED, other=xfailed)
    assert kind == "failed"
    assert text.splitlines()[0] == "rank 0 failed: subtest [first]: ValueError: no"
    assert "E   ValueError: no" in text
    assert merged(ranks, end, SKIPPED, other=xfailed)[0] == "xfailed"
    lost = dataclasses.replace(FAILED, message="RuntimeError: Connection closed by peer", lost=True)
    assert merged(ranks, end, lost, other=xfailed)[0] == "xfailed"


@pytest.mark.parametrize("status", ["killed", "exited", "stuck"])
def test_a_rank_that_died_or_hangs_shows_what_failed_before(status: str, ranks: FakeRanks) -> None:
    kind, text = merged(ranks, RankEnd(0, status, "is gone"), FAILED, timed_out=status == "stuck")
    assert kind == "failed"
    assert "--- subtest [first] ---\nE   ValueError: no" in text


class _Report(pytest.TestReport):
    """As the class of the plugin pytest-subtests for pytest 8, which is not pytest's own."""

    context = None

    @property
    def head_line(self) -> str:
        return "test_it [first] (number=1)"


class _Of(pytest.TestReport):
    """A report that another plugin made of a whole phase."""


def test_the_type_of_a_report_marks_a_subtest() -> None:
    def made(kind: type[pytest.TestReport], outcome: Any, text: str, when: Any) -> pytest.TestReport:
        return kind("test_x.py::test_it", ("test_x.py", 1, "test_it"), {}, outcome, text or None, when)

    phases = Phases()
    subtest = phases.of(made(_Report, "failed", "E   ValueError: no", "call"))
    assert (subtest.subtest, subtest.outcome, subtest.ending) == ("[first] (number=1)", "failed", None)
    call = phases.of(made(_Of, "passed", "", "call"))
    assert (call.subtest, call.outcome) == ("", "failed")
    assert call.ending == ("failed", "failed: subtest [first] (number=1): ValueError: no")
    assert phases.of(made(pytest.TestReport, "passed", "", "teardown")).outcome == "passed"
