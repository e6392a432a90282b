"""Known issues of a project's own file: they cover its tests, and unused ones are reported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.request import Request
from pytest_distcompat.plugin.marked.phase import XFAILED, Phase
from pytest_distcompat.scenario import TRAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.plugin.conftest import FakeRanks

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.trace import Trace

Pytester = pytest.Pytester

KNOWN = """
[[issue]]
match = "KeyError: '_orig_mod"
reason = "org/repo#1"
"""
MARKED = """
import pytest

@pytest.mark.distcompat(strategies=["ddp", "fsdp2"])
def test_cells(cell): pass

@pytest.mark.distcompat
def test_unmarked(): pass

def test_ordinary(): pass
"""


#: How messages name the first entry.
FIRST = "known issues known.toml: issue 1 (org/repo#1)"


def declare_known(pytester: Pytester, text: str, ini: str = "") -> Pytester:
    (pytester.path / "known.toml").write_text(f"version = 1\n{text}", encoding="utf-8")
    pytester.makeini(f"[pytest]\ndistcompat_known = known.toml\n{ini}")
    return pytester


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("issue = 'a.toml'", "*issue: expected tables, [[][[]...[]][]], got 'a.toml'"),
        ("[[issue]]\nmatch = 'x'", "*issue 1 (no reason): reason is missing"),
        ("[[issue]]\nreason = 'x'", "*issue 1 (x): match is missing"),
        (
            KNOWN + "color = 'red'",
            "*1 (org/repo#1): no key named 'color'. Known: also, cells, check, *strict, test, until, when",
        ),
        (KNOWN + "when = 'transformers => 5'", "*1 (org/repo#1): Expected semicolon*"),
        (KNOWN + "when = 'torch'\npackages = ['torch']", "*when and packages are one thing; give one of them"),
        (KNOWN + "strict = true", "*strict = true says that it must fail; say where, with check or test"),
        (KNOWN + "test = 'a'\nstrict = 1", "*strict=1: expected true or false"),
        (KNOWN + "test = '('", "*test='(' is no regular expression*"),
        (KNOWN + "cells = { strategi = 'ddp' }", "*no facet named 'strategi'. Known: *strategy*"),
        (KNOWN + "check = 'resum'", "*1 (org/repo#1): no check named 'resum'. Known: *resume*"),
        (
            KNOWN + "cells = { strategy = ['ddp', 'fspd2'] }",
            "*1 (org/repo#1): no strategy named 'fspd2'. Known: *fsdp2*",
        ),
        (KNOWN + "cells = { precision = 'bf16' }", "*1 (org/repo#1): no precision named 'bf16'. Known: *bf16_upcast*"),
        (
            KNOWN + "cells = { world_size = '2' }",
            "*world_size takes a number, a lower bound as '>=2', or a tuple of them, got '2'",
        ),
        (KNOWN + "cells = []", "*1 (org/repo#1): cells=[[][]]: expected a table of facets, or a list of such"),
        (
            KNOWN + "cells = { strategy = [] }",
            "*1 (org/repo#1): cells: strategy = [[][]] is no cell; leave it out for all",
        ),
        (KNOWN + "cells = 3", "*1 (org/repo#1): cells=3: expected a table of facets, or a list of such"),
        (KNOWN + "device = 'gpu'", "*1 (org/repo#1): device 'gpu'; expected cpu or cuda"),
        (KNOWN + "kind = ['fails']", "*1 (org/repo#1): kind=[[]'fails'[]]; expected a text"),
        (KNOWN + "also = ['a', 'b']", "*1 (org/repo#1): also=[[]'a', 'b'[]]; expected a text"),
        (KNOWN + "id = 'a'" + KNOWN + "id = 'a'", "*more than one issue has the id 'a'"),
    ],
)
def test_a_wrong_word_is_a_usage_error_that_lists_the_right_ones(text: str, message: str, pytester: Pytester) -> None:
    declare_known(pytester, text).makepyfile("def test(): pass")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *known.toml*{message}"])


def test_a_file_that_is_no_toml_is_a_usage_error(pytester: Pytester) -> None:
    declare_known(pytester, "[[issue]\n").makepyfile("def test(): pass")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *known.toml: *"])


# Known issues of marked tests.


def failing(text: str, **more: Any) -> Any:
    """Return an answer of ranks of which one fails with that text, or dies."""

    def fail(request: Request) -> Ending:
        end = RankEnd(1, "raised", f"raised failed: {text}", text=text, kind="failed")
        return Ending((RankEnd(0, "stopped"), more.get("end", end)), {0: [], 1: []}, command="torchrun ...")

    return fail


def test_a_failure_that_matches_is_known(pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN + 'when = "pytest >= 1"').makepyfile(MARKED)
    ranks.answer = failing("KeyError: '_orig_mod.weight'")
    result = pytester.runpytest_inprocess("-rx")
    result.assert_outcomes(passed=1, xfailed=3)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["XFAIL *::test_unmarked - org/repo#1"])
    result.stdout.no_fnmatch_line("*remove me*")


def test_every_entry_that_matches_a_failure_is_used(pytester: Pytester, ranks: FakeRanks) -> None:
    """The second was to be removed, for the first had excused all."""
    declare_known(pytester, KNOWN + KNOWN.replace("#1", "#2").replace("KeyError: '", "")).makepyfile(MARKED)
    ranks.answer = failing("KeyError: '_orig_mod.weight'")
    result = pytester.runpytest_inprocess("-rx")
    result.assert_outcomes(passed=1, xfailed=3)
    result.stdout.fnmatch_lines(["XFAIL *::test_unmarked - org/repo#1"])
    result.stdout.no_fnmatch_line("*remove me*")


def test_a_failure_that_does_not_match_fails(pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN).makepyfile(MARKED)
    ranks.answer = failing("KeyError: 'weight'")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*= declared known issues =*",
            f"remove me: {FIRST}: covers 3 that ran, excused none",
        ]
    )


def test_reproduce_commands_are_not_matched(pytester: Pytester, ranks: FakeRanks) -> None:
    """They name the test: whatever went wrong in it would be known."""
    for match in ("test_unmarked", "torchrun"):
        declare_known(pytester, f"[[issue]]\nmatch = '{match}'\nreason = 'r'\n").makepyfile(MARKED)
        ranks.answer = failing("KeyError: 'weight'")
        result = pytester.runpytest_inprocess("-k", "unmarked")
        result.assert_outcomes(failed=1, deselected=3)
        result.stdout.fnmatch_lines(["reproduce: pytest *::test_unmarked", "this run alone: torchrun ..."])


@pytest.mark.parametrize("status", ["killed", "stuck"])
def test_a_crash_or_a_hang_is_never_known(status: str, pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN).makepyfile(MARKED)
    error = "KeyError: '_orig_mod'"
    ranks.answer = failing(error, end=RankEnd(1, status, error, text=error))
    pytester.runpytest_inprocess().assert_outcomes(passed=1, failed=3)


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ('test = "test_unmarked"', 1),
        ('test = "test_cells.*fsdp2"', 1),
        ('cells = { strategy = "fsdp2" }', 1),
        ('cells = { strategy = ["ddp", "fsdp2"] }', 2),
        ('when = "pytest < 1"', 0),
        ('when = ["pytest", "no-such-distribution"]', 0),
        ('device = "cuda"', 0),
        ('drivers = ["accelerate"]', 0),
        ('check = "names"', 0),
        ('kind = "refuses"', 0),
    ],
)
def test_an_entry_may_name_the_test(more: str, known: int, pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN + more).makepyfile(MARKED)
    ranks.answer = failing("KeyError: '_orig_mod.weight'")
    pytester.runpytest_inprocess().assert_outcomes(passed=1, failed=3 - known, xfailed=known)


@pytest.mark.parametrize(("strict", "failed"), [("", 1), ("strict = true", 1), ("strict = false", 0)])
def test_an_entry_whose_tests_pass_is_to_be_removed(
    strict: str, failed: int, pytester: Pytester, ranks: FakeRanks
) -> None:
    declare_known(pytester, f"{KNOWN}test = 'test_unmarked'\n{strict}").makepyfile(MARKED)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=4 - failed, failed=failed)
    if failed:
        result.stdout.fnmatch_lines([f"declared to fail, but it passes: fixed? Then remove {FIRST}"])
    result.stdout.fnmatch_lines([f"remove me: {FIRST}: covers 1 that ran, excused none"])


def test_an_unused_entry_is_to_be_removed_in_a_complete_session(pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN + "test = 'no_such_test'").makepyfile(MARKED)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["remove me: *1 (org/repo#1): covers nothing that ran"])
    for args in (["-k", "unmarked"], [f"{pytester.path.name}.py::test_unmarked"], ["--collect-only"]):
        pytester.runpytest_inprocess(*args).stdout.no_fnmatch_line("*remove me*")


def test_paths_and_options_that_select_narrow_a_run_too(pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN + "test = 'no_such_test'")
    (pytester.mkdir("tests") / "test_a.py").write_text(MARKED, encoding="utf-8")
    (pytester.mkdir("other") / "test_b.py").write_text("def test(): pass", encoding="utf-8")
    for args in (["tests"], ["tests/test_a.py"], ["--distcompat-strategies=ddp"], ["--distcompat-world-size=2"]):
        pytester.runpytest_inprocess(*args).stdout.no_fnmatch_line("*remove me*")
    for args in ([], ["."], [str(pytester.path)], ["tests", "."], ["--distcompat-timeout=9"]):
        pytester.runpytest_inprocess(*args).stdout.fnmatch_lines(["remove me: *covers nothing that ran"])
    # Where all tests are, the project may say.
    declare_known(pytester, KNOWN + "test = 'no_such_test'", "testpaths = tests")
    for args in ([], ["tests"], ["tests", "other"]):
        pytester.runpytest_inprocess(*args).stdout.fnmatch_lines(["remove me: *covers nothing that ran"])
    for args in (["other"], ["tests/test_a.py"]):
        pytester.runpytest_inprocess(*args).stdout.no_fnmatch_line("*remove me*")


def test_an_interrupted_session_reports_no_unused_entry(pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN + "test = 'test_unmarked'" + KNOWN.replace("#1", "#2") + "test = 'test_cells'")
    pytester.makepyfile(MARKED)
    ranks.answer = failing("otherwise")
    result = pytester.runpytest_inprocess("-x", "-p", "no:randomly")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["remove me: *2 (org/repo#2): covers 1 that ran, excused none"])
    result.stdout.no_fnmatch_line("*covers nothing*")


def test_entries_for_other_versions_are_named(pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN + 'when = "pytest == 1.0"').makepyfile(MARKED)
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["not in force here: *1 (org/repo#1): pytest == 1.0"])
    result.stdout.no_fnmatch_line("*remove me*")


def test_an_entry_that_ended_excuses_nothing_and_says_so(pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN + "until = '2020-01-31'").makepyfile(MARKED)
    ranks.answer = failing("KeyError: '_orig_mod.weight'")
    result = pytester.runpytest_inprocess("-k", "unmarked")
    result.assert_outcomes(failed=1, deselected=3)
    result.stdout.fnmatch_lines([f"the quarantine ended on 2020-01-31: {FIRST}"])
    result.stdout.fnmatch_lines([f"not in force here: {FIRST}: ended on 2020-01-31"])
    result.stdout.no_fnmatch_line("*remove me*")
    ranks.answer = failing("KeyError: 'weight'")
    pytester.runpytest_inprocess("-k", "unmarked").stdout.no_fnmatch_line("*quarantine*")


def test_an_xfail_mark_comes_first_and_ordinary_tests_are_not_covered(pytester: Pytester, ranks: FakeRanks) -> None:
    declare_known(pytester, KNOWN).makepyfile(
        """
        import pytest

        @pytest.mark.distcompat
        @pytest.mark.xfail(reason="of the mark")
        def test_marked(): pass

        def test_ordinary(): raise KeyError("_orig_mod")
        """
    )
    # The ranks have weighed the mark.
    end = RankEnd(1, "raised", "raised xfailed: of the mark", text="KeyError: '_orig_mod'", kind=XFAILED)
    ranks.answer = failing("", end=end)
    result = pytester.runpytest_inprocess("-rx")
    result.assert_outcomes(xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["XFAIL *::test_marked - of the mark"])


def test_an_entry_of_a_file_does_the_same(pytester: Pytester, ranks: FakeRanks) -> None:
    text = 'version = 1\n[[issue]]\nid = "a"\nlink = "https://example.org/1"\nreason = "r"\ncheck = "*"\nmatch = "_orig_mod"\n'
    (pytester.path / "mine.toml").write_text(text + 'test = "test_unmarked"\n', encoding="utf-8")
    pytester.makepyfile(MARKED)
    ranks.answer = failing("KeyError: '_orig_mod'")
    result = pytester.runpytest_inprocess("--distcompat-known=mine.toml", "-rx")
    result.assert_outcomes(passed=1, failed=2, xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL *::test_unmarked - r (https://example.org/1)"])


def test_workers_judge_and_the_controller_counts(pytester: Pytester, ranks: FakeRanks) -> None:
    # In a worker there are real ranks: skipped before any starts, or broken without one.
    declare_known(
        pytester, KNOWN.replace("KeyError: '_orig_mod", "no such file") + KNOWN.replace("KeyError: '_orig_mod", "other")
    )
    pytester.makepyfile("def test(distcompat): distcompat._label = 1; raise KeyError('no such file')")
    result = pytester.runpytest_subprocess("-n", "1", "-rx")
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["remove me: *issue 2 (org/repo#1): covers 1 that ran, excused none"])
    result.stdout.no_fnmatch_line("*issue 1 *")


def test_unmet_requirements_are_named(pytester: Pytester, ranks: FakeRanks) -> None:
    """Of several requirements those that hold are no reason, nor are they if it is the device; markers are read too."""
    assert not ranks.requests
    more = (
        "packages = ['pytest', 'torch >= 99', 'pytest; python_version < \"3\"']"
        + KNOWN
        + "when = 'pytest'\ndevice = 'cuda'"
    )
    declare_known(pytester, KNOWN + more).makepyfile("def test(): pass")
    result = pytester.runpytest_inprocess("--distcompat-gpus", "0")
    message = [
        line.partition("(org/repo#1): ")[2] for line in result.outlines if line.startswith("not in force here: ")
    ]
    assert message == ['torch >= 99, pytest; python_version < "3"', "cuda"]


# Of suites.

SUITE = """
from pytest_distcompat import CompatSuite, Driver, Matrix

class Mine(Driver):
    name = "mine"

class TestMine(CompatSuite):
    driver = "test_mine:Mine"
    matrix = Matrix(("ddp", "fsdp1"), precisions=("fp32",))
"""


def claim(cell: Cell, trace: Trace) -> Iterator[str]:
    """Nothing is wrong.

    If it fails: this text helps.
    """
    if cell.strategy == "fsdp1":
        yield "rank 0: KeyError: '_orig_mod.weight'"


@pytest.fixture
def suite(pytester: Pytester, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> Pytester:
    """Of two cells; the claim does not hold in one of them."""
    never = Check("names", TRAIN, (), claim, not_applicable=lambda cell, driver: f"nothing of {cell} by {driver.name}")
    monkeypatch.setitem(vars(CHECKS), "by_name", {"claim": Check("claim", TRAIN, (), claim), "names": never})
    pytester.makepyfile(test_mine=SUITE)
    pytester.syspathinsert()
    return pytester


@pytest.mark.parametrize(
    ("more", "outcomes", "removed"),
    [
        ("", {"passed": 1, "xfailed": 1}, ""),
        ('check = "claim"\ncells = { strategy = "fsdp1" }', {"passed": 1, "xfailed": 1}, ""),
        ('test = "TestMine::test.fsdp1"', {"passed": 1, "xfailed": 1}, ""),
        ('check = "claim"', {"failed": 1, "xfailed": 1}, ""),
        ('check = "claim"\ncells = { strategy = "ddp" }', {"failed": 2}, "covers 1 that ran, excused none"),
        ('check = "names"', {"passed": 1, "failed": 1}, "covers nothing that ran"),
        ('drivers = ["accelerate"]', {"passed": 1, "failed": 1}, "covers nothing that ran"),
    ],
)
def test_verdicts_of_a_suite(more: str, outcomes: dict[str, int], removed: str, suite: Pytester) -> None:
    declare_known(suite, KNOWN + more)
    result = suite.runpytest_inprocess("--distcompat-report=out.json", "-rx")
    result.assert_outcomes(**outcomes)
    if "xfailed" in outcomes:
        result.stdout.fnmatch_lines(["XFAIL *fsdp1-fp32-w2:claim[]] - org/repo#1"])
    run = json.loads((suite.path / "out.json").read_text(encoding="utf-8"))["session"]
    expected = [f"{FIRST}: {removed}"] if removed else []
    assert run["remove"] == expected


def test_a_skipped_test_is_neither_known_nor_fixed(pytester: Pytester, ranks: FakeRanks) -> None:
    """A test that all ranks skip is neither known nor fixed."""
    skip = ranks.phases(call=Phase("call", "skipped", "no need", location=("a.py", 3, "Skipped: no need")))
    ranks.answer = lambda request: ranks.ending((RankEnd(0, "done"), skip), (RankEnd(1, "done"), skip))
    declare_known(pytester, KNOWN + "test = 'unmarked'").makepyfile(MARKED)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.no_fnmatch_line("*remove me: *that ran, excused*")


def test_every_entry_that_matches_a_verdict_is_used(suite: Pytester) -> None:
    """Both were to be removed, for the verdict has the reasons of both, and neither alone."""
    declare_known(suite, KNOWN + KNOWN.replace("#1", "#2").replace("KeyError: '", ""))
    result = suite.runpytest_inprocess("--distcompat-report=out.json")
    result.assert_outcomes(passed=1, xfailed=1)
    run = json.loads((suite.path / "out.json").read_text(encoding="utf-8"))["session"]
    assert run["remove"] == []
