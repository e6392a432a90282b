"""Every verdict in the terminal's matrix, the report files and JUnit XML, on hand-made runs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.events import Action, Done, Event, SnapshotTaken
from pytest_distcompat.installed import versions
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.request import Request
from pytest_distcompat.report.text import Line, matrix_text
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.status import Status, Verdict, all_statuses
from pytest_distcompat.trace import Trace

if TYPE_CHECKING:
    from tests.plugin.conftest import FakeRanks

DRIVER = """
from pytest_distcompat import Driver

class Mine(Driver):
    name = "mine"

    @classmethod
    def unsupported_reason(cls, cell, device="cpu"):
        return "mine has no bf16_pure" if cell.precision == "bf16_pure" else ""
"""
SUITE = """
from pytest_distcompat import CompatSuite, Matrix, fails, refuses

class TestMine(CompatSuite):
    driver = "my_driver:Mine"
    matrix = Matrix(
        ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"), precisions=("fp32", "bf16_upcast", "bf16_pure")
    )
    expect = (
        fails("claim", strategy="fsdp1", precision="bf16_upcast", reason="org/repo#1", match="wrong"),
        fails("claim", strategy="ddp", precision="bf16_upcast", reason="org/repo#2"),
        refuses("*", strategy=("zero1", "zero2"), precision="fp32", match="not supported"),
        fails("claim", strategy="zero3", reason="no excuse for a crash or a hang"),
    )
"""
#: Cell to what becomes of the check named claim.
STATUS = {
    "ddp-fp32-w2": "passed",
    "ddp-bf16_upcast-w2": "fixed?",
    "fsdp1-fp32-w2": "failed",
    "fsdp1-bf16_upcast-w2": "known",
    "fsdp2-fp32-w2": "failed",
    "fsdp2-bf16_upcast-w2": "passed",
    "zero1-fp32-w2": "refused",
    "zero1-bf16_upcast-w2": "passed",
    "zero2-fp32-w2": "late",
    "zero2-bf16_upcast-w2": "passed",
    "zero3-fp32-w2": "crashed",
    "zero3-bf16_upcast-w2": "hung",
    **{f"{strategy}-bf16_pure-w2": "skipped" for strategy in ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")},
}
MATRIX = """
TestMine (driver my_driver:Mine)
                     claim
  ddp-fp32-w2        ok
  ddp-bf16_upcast-w2  FIXED?
  ddp-bf16_pure-w2   -
  fsdp1-fp32-w2      FAIL
  fsdp1-bf16_upcast-w2  known
  fsdp2-fp32-w2      FAIL
  zero1-fp32-w2      refused
  zero2-fp32-w2      LATE
  zero3-fp32-w2      CRASH
  zero3-bf16_upcast-w2  HUNG
  known: org/repo#1 [fsdp1-bf16_upcast-w2:claim]
  not run: mine has no bf16_pure [ddp-bf16_pure-w2, fsdp1-bf16_pure-w2, fsdp2-bf16_pure-w2 and 3 more]
  refused: ValueError: not supported [zero1-fp32-w2:claim]
18 verdicts from 12 runs
"""


def plain_text(line: Line) -> str:
    """The line without its styles."""
    return "".join(text for text, _ in line)


def claim(cell: Cell, trace: Trace) -> Iterator[str]:
    """Nothing is wrong.

    If it fails: this text helps.
    """
    if cell.strategy == "fsdp1":
        yield "rank 0: something is wrong; expected something else"


def live(request: Request, ranks: FakeRanks) -> Ending:
    """Return the ending of a run, by its cell."""

    def actions(*names: str, broken: str = "") -> list[Event]:
        events: list[Event] = []
        for index, name in enumerate(names):
            snapshot = {"rank": 0, "run": "train", "action": name, "index": index}
            events.append(Action(name, index))
            if name != broken:
                events.append(SnapshotTaken(name, index, snapshot))
        return events

    def end(status: str, message: str, text: str, at: str, **more: Any) -> Ending:
        action = actions("build_model", "build", "step")[: {"build": 3, "step": 5}[at]]
        ends = RankEnd(0, status, message, text), RankEnd(1, "stopped", "was killed by SIGTERM")
        return Ending(ends, {0: action, 1: []}, command="torchrun ...", timeout=3, **more)

    cell = Cell.parse(request.payload["cell"])
    message = "raised ValueError: not supported"
    if (cell.strategy, cell.precision) in {("zero1", "fp32"), ("fsdp2", "fp32")}:
        return end("raised", message, "Traceback ...\nValueError: not supported", "build")
    if (cell.strategy, cell.precision) == ("zero2", "fp32"):
        return end("raised", message, "Traceback ...\nValueError: not supported", "step")
    if (cell.strategy, cell.precision) == ("zero3", "fp32"):
        return end("killed", "was killed by SIGKILL", "", "build")
    if (cell.strategy, cell.precision) == ("zero3", "bf16_upcast"):
        return end("stuck", "was still running at the time limit", "", "build", timed_out=True)
    ends = (RankEnd(0, "done"), RankEnd(1, "done"))
    events = [*actions("build_model", "build", "step"), Done()]
    return Ending(ends, {0: events, 1: list(events)})


@pytest.fixture
def suite(pytester: pytest.Pytester, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite with one check of ours, whose every run is made up."""
    made = Check("claim", TRAIN, (("train", "step", 0),), claim)
    monkeypatch.setitem(vars(CHECKS), "by_name", {"claim": made})
    ranks.answer = lambda request: live(request, ranks)
    pytester.makepyfile(my_driver=DRIVER, test_mine=SUITE)
    pytester.syspathinsert()
    return pytester


def test_the_matrix_in_the_terminal(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=5, failed=6, skipped=6, xfailed=1)
    shown = [" ".join(line.split()) for line in result.outlines]
    for line in MATRIX.strip().splitlines():
        assert " ".join(line.split()) in shown, line
    # A leak is charged by the leases, an error is no verdict, and nothing is simulated here.
    assert set(STATUS.values()) == set(all_statuses()) - {Status.LEAKED, Status.ERROR, "simulated"}


@pytest.mark.nightly
def test_the_matrix_is_the_same_in_any_order(suite: pytest.Pytester) -> None:
    def rows(*args: str) -> list[str]:
        lines = suite.runpytest_inprocess(*args).outlines
        start, *_ = [number for number, line in enumerate(lines) if "distributed compatibility" in line]
        end, *_ = [number for number, line in enumerate(lines) if "verdicts from" in line]
        return lines[start:end]

    names = [f"test_mine.py::TestMine::test[{cell}:claim]" for cell in STATUS]
    assert rows("-p", "no:randomly", *names) == rows("-p", "no:randomly", *reversed(names))


def test_the_text_of_a_failure(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("-p", "no:randomly", "-rx", "--distcompat-timeout=3")
    result.stdout.fnmatch_lines(
        [
            "*TestMine.test[[]ddp-bf16_upcast-w2:claim[]]*",
            "declared to fail, but it passes: fixed? Then remove fails('claim', *reason='org/repo#2'*",
            "ddp-bf16_upcast-w2: claim: fixed?",
            "reproduce: pytest 'test_mine.py::TestMine::test[[]ddp-bf16_upcast-w2:claim[]]' --distcompat-timeout=3",
            "*TestMine.test[[]fsdp1-fp32-w2:claim[]]*",
            "rank 0: something is wrong; expected something else",
            "fsdp1-fp32-w2: claim: failed",
            "the claim: Nothing is wrong.",
            "If it fails: this text helps.",
            "rank 0 raised ValueError: not supported",
            "Traceback ...",
            "consequences:",
            "fsdp2-fp32-w2: claim: failed",
            "this run alone: torchrun ...",
            "refused only at 'step', after build; expected at build",
            "zero2-fp32-w2: claim: late",
            "rank 0 was killed by SIGKILL",
            "zero3-fp32-w2: claim: crashed",
            "time limit of 3 s: rank 0 still running",
            "zero3-bf16_upcast-w2: claim: hung",
            "XFAIL test_mine.py::TestMine::test[[]fsdp1-bf16_upcast-w2:claim[]] - org/repo#1",
        ]
    )
    result.stdout.no_fnmatch_line("*cases.py*")


def test_a_failure_shows_the_line_that_declares_it(suite: pytest.Pytester) -> None:
    """The lines of a first run, pasted into the suite, are what its second run expects."""
    result = suite.runpytest_inprocess(
        "-p", "no:randomly", "--distcompat-strategies=fsdp1,fsdp2", "--distcompat-report=1.json"
    )
    lines = [line.partition("in expect: ")[2] for line in result.outlines if "in expect: " in line]
    assert lines == [
        "fails('claim', precision='fp32', strategy='fsdp1', reason='a link to the issue', match='something is wrong; expected something else'),",
        "refuses('*', precision='fp32', strategy='fsdp2', reason='', match='ValueError: not supported'),",
    ]
    suite.makepyfile(test_mine=SUITE.replace("expect = (", f"expect = ({' '.join(lines)}"))
    again = suite.runpytest_inprocess("--distcompat-strategies=fsdp1,fsdp2", "--distcompat-report=2.json")
    assert again.ret == pytest.ExitCode.OK
    data = json.loads((suite.path / "2.json").read_text(encoding="utf-8"))
    status_by_cell = {result["cell"]: result["status"] for result in data["results"]}
    assert status_by_cell["fsdp1-fp32-w2"] == "known"
    assert status_by_cell["fsdp2-fp32-w2"] == "refused"


def test_the_json_report_has_every_verdict(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("--distcompat-report=out.json", "--distcompat-gpus=0")
    result.stdout.fnmatch_lines(["report: out.json"])
    data = json.loads((suite.path / "out.json").read_text(encoding="utf-8"))
    assert data["format"] == 2
    status_by_cell = {result["cell"]: result["status"] for result in data["results"]}
    assert status_by_cell == STATUS
    run = data["session"]
    assert run["device"] == "cpu"
    assert run["world_size"] == 2
    assert run["runs"] == 12
    assert run["versions"] == versions()
    assert run["settings"]["gpus"] == {"value": "0", "from": "option"}
    by_cell = {result["cell"]: result for result in data["results"]}
    assert by_cell["zero1-bf16_pure-w2"]["reason"] == "mine has no bf16_pure"
    known = by_cell["fsdp1-bf16_upcast-w2"]
    assert known["suite"] == "TestMine"
    assert known["driver"] == "my_driver:Mine"
    assert known["check"] == "claim"
    assert known["nodeid"] == "test_mine.py::TestMine::test[fsdp1-bf16_upcast-w2:claim]"
    assert known["reason"] == "org/repo#1"
    assert known["message"].startswith("rank 0:")
    assert known["seconds"] >= 0


def test_the_markdown_report_has_every_verdict(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess("--distcompat-report=out.md")
    text = (suite.path / "out.md").read_text(encoding="utf-8")
    for cell, status in STATUS.items():
        expected = Status.from_name(status)
        assert f"| {cell} | {expected.word} |" in text
        # What is red is among the causes, once.
        assert text.count(f"   - {cell} (my_driver:Mine): claim") == expected.red
    assert "- known: org/repo#1 (fsdp1-bf16_upcast-w2:claim)\n" in text
    assert "- -: mine has no bf16_pure (ddp-bf16_pure-w2:claim, " in text
    assert "18 results, 12 runs, device cpu; python " in text


def test_junit_xml_has_every_verdict(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess("--junitxml=junit.xml")
    cases = {case.get("name", ""): case for case in ET.parse(suite.path / "junit.xml").iter("testcase")}
    kinds: dict[str, list[str]] = {"passed": [], "refused": [], "known": ["skipped"], "skipped": ["skipped"]}
    for cell, status in STATUS.items():
        case = cases[f"test[{cell}:claim]"]
        outcomes = [child.tag for child in case if child.tag in {"failure", "skipped", "error"}]
        assert outcomes == kinds.get(status, ["failure"]), cell
        if outcomes == ["failure"]:
            failure = case.find("failure")
            assert failure is not None
            message = failure.get("message", "")
            text = failure.text or ""
            assert message, "in short"
            assert text.startswith(f"{message}\n"), "and the whole below it"
    skipped = cases["test[ddp-bf16_pure-w2:claim]"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "mine has no bf16_pure"


def test_two_suites_of_one_name_do_not_hide_each_other(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_other=SUITE.replace('strategy="zero3"', 'strategy="zero2"'))
    result = suite.runpytest_inprocess("--distcompat-strategies=zero3", "--distcompat-precisions=fp32")
    result.assert_outcomes(failed=2)
    assert result.outlines.count("TestMine (driver my_driver:Mine)") == 2


def test_a_verdict_without_reason_is_still_shown() -> None:
    refused = Verdict("names", "ddp-fp32-w2", Status.REFUSED)
    lines = [plain_text(line).strip() for line in matrix_text([refused])]
    assert lines[2:] == ["ddp-fp32-w2  refused", "refused:  [ddp-fp32-w2:names]"]


def test_without_suites_no_verdict_is_printed(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.distcompat\ndef test(): pass")
    result = pytester.runpytest_inprocess("--distcompat-timeout=3")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*distributed compatibility*")


NEEDS = """
from pytest_distcompat import Driver

class Mine(Driver):
    name = "mine"

    @classmethod
    def unsupported_reason(cls, cell, device="cpu"):
        return "accelerate is not installed" if cell.strategy == "fsdp2" else None
"""
ONE_OF_TWO = """
from pytest_distcompat import CompatSuite, Matrix

class TestMine(CompatSuite):
    driver = "my_driver:Mine"
    matrix = Matrix(strategies=({strategies}), precisions=("fp32",))
"""


@pytest.fixture
def needs(pytester: pytest.Pytester, ranks: FakeRanks) -> pytest.Pytester:
    """A suite of one cell, whose driver cannot run it for want of a package."""
    pytester.makepyfile(my_driver=NEEDS, test_mine=ONE_OF_TWO.format(strategies='"fsdp2",'))
    pytester.syspathinsert()
    return pytester


def test_a_session_in_which_no_cell_ran_fails(needs: pytest.Pytester) -> None:
    result = needs.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "no cell ran, so nothing was checked; expected at least one verdict",
            "  TestMine fsdp2-fp32-w2: accelerate is not installed",
            "  install it: pip install accelerate",
            "  --distcompat-nothing-ran=pass lets such a session pass",
        ]
    )


def test_nothing_ran_pass_lets_a_session_without_cells_pass(needs: pytest.Pytester) -> None:
    result = needs.runpytest_inprocess("--distcompat-nothing-ran=pass")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("no cell ran*")


def test_options_that_select_no_cell_fail(needs: pytest.Pytester) -> None:
    result = needs.runpytest_inprocess("--distcompat-strategies=zero3")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["  TestMine: no cell of TestMine is selected: strategies 'zero3' of fsdp2"])
    result = needs.runpytest_inprocess("--distcompat-drivers=torch")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["  TestMine: --distcompat-drivers=torch leaves out driver 'my_driver:Mine'"])


def test_other_tests_do_not_make_a_session_without_cells_pass(needs: pytest.Pytester) -> None:
    needs.makepyfile(test_other="def test(): pass")
    assert needs.runpytest_inprocess().ret == pytest.ExitCode.TESTS_FAILED
    assert needs.runpytest_inprocess("test_other.py").ret == pytest.ExitCode.OK


def test_without_a_rank_to_stop_pdb_prints_what_to_do(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("--pdb", "-k", "zero3 and fp32 or fsdp1 and fp32")
    result.stdout.fnmatch_lines(
        [
            "*> no debugger >*",
            "No rank raised an exception at which a debugger could stop. To look into the run, put",
            "torch.distributed.breakpoint(rank=0) where it should stop, and run: *",
        ]
    )
    # pytest's own debugger has not started: its frames are none of the user's.
    assert "entering PDB" not in result.stdout.str()
