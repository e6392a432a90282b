"""The mark before any rank starts: what it says wrongly, what it makes of a test, what is not its business."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.launch.forensics.ending import RankEnd
from pytest_distcompat.plugin.marked.phase import Phase
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from tests.plugin.conftest import FakeRanks

ARGUMENTS = "world_size, nodes, strategies, precisions, options, timeout, reuse"
MARKED = "import pytest\n@pytest.mark.distcompat({})\ndef test(): pass"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("2", f"takes keyword arguments only: {ARGUMENTS}"),
        ("worldsize=2", f"has no argument 'worldsize'. Known: {ARGUMENTS}"),
        ("world_size='2'", "(world_size='2'): expected a whole number of at least 1"),
        ("world_size=0", "(world_size=0): expected a whole number of at least 1"),
        ("world_size=True", "(world_size=True): expected a whole number of at least 1"),
        ("timeout=0", "(timeout=0): expected a number of seconds above 0"),
        ("timeout='1m'", "(timeout='1m'): expected a number of seconds above 0"),
        ("strategies='ddp'", "(strategies=...) takes a list, got 'ddp'"),
        ("precisions=32", "(precisions=...) takes a list, got 32"),
        ("options={'compile': True}", "(options=...) takes a list, got {'compile': True}"),
        ("options=['compile']", "(options=...) takes a list of dicts like {'compile': True}, got 'compile'"),
        ("strategies=['fsdp3']", f"no strategy named 'fsdp3'. Known: {', '.join(STRATEGIES.names())}."),
        ("precisions=['int4']", f"no precision named 'int4'. Known: {', '.join(PRECISIONS.names())}."),
        ("options=[{'compiled': True}]", "no option named 'compiled'. Known: *compile*"),
        ("options=[{'state_dict': 'half'}]", "option 'state_dict' has no value 'half'. Known: 'sharded', 'full'"),
    ],
)
def test_a_wrong_argument_is_a_collection_error_that_lists_the_right_ones(
    argument: str, message: str, pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    pytester.makepyfile(MARKED.format(argument))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"*.py::test: *{message.replace('[', '[[]')}"])
    assert not ranks.requests


def test_a_marked_item_that_cannot_run_on_ranks_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, unittest

        @pytest.mark.distcompat
        class TestX(unittest.TestCase):
            def test(self): pass
        """
    )
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: *::TestX::test: *works on functions and on methods of plain classes, not on unittest.TestCase*"]
    )


@pytest.mark.parametrize("of_conftest", [False, True], ids=["parameter", "conftest"])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("worldsize=2", f"has no argument 'worldsize'. Known: {ARGUMENTS}"),
        ("strategies=['fsdp3']", f"no strategy named 'fsdp3'. Known: {', '.join(STRATEGIES.names())}."),
        ("strategies=['ddp']", "cells need the mark on the function, class or module"),
    ],
)
def test_a_wrong_mark_added_late_is_a_usage_error(
    argument: str, message: str, of_conftest: bool, pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    mark = f"pytest.mark.distcompat({argument})"
    if of_conftest:
        pytester.makeconftest(
            f"import pytest\ndef pytest_collection_modifyitems(items):\n    items[0].add_marker({mark})"
        )
        pytester.makepyfile("def test(): pass")
    else:
        pytester.makepyfile(
            f"import pytest\n@pytest.mark.parametrize('x', [pytest.param(1, marks={mark})])\ndef test(x): pass"
        )
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *::test*: *{message.replace('[', '[[]')}"])
    result.stderr.no_fnmatch_line("*INTERNALERROR*")
    assert not ranks.requests


def test_a_mark_added_late_may_set_the_world_size(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.distcompat(world_size=3)), 2])
        def test(x): pass
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=2)
    assert [request.world_size for request in ranks.requests] == [3]


class Fixtures:
    """A plugin that is an object."""

    @pytest.fixture
    def number(self) -> int:
        return 5


def test_a_fixture_of_a_plugin_object_is_a_usage_error(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    """On ranks it was not found, without a word of why."""
    pytester.makepyfile("import pytest\n@pytest.mark.distcompat\ndef test(number): pass\n\ndef test_here(number): pass")
    result = pytester.inline_run(plugins=[Fixtures()])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert not ranks.requests
    assert pytester.inline_run("-k", "here", plugins=[Fixtures()]).ret == pytest.ExitCode.OK


def test_cells_become_ids(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        mark = pytest.mark.distcompat

        @mark(world_size=4, strategies=["ddp", "fsdp2"], precisions=["fp32", "bf16_upcast"])
        def test_a(cell): pass

        @mark(strategies=["fsdp1"], options=[{}, {"compile": True, "state_dict": "full"}])
        @pytest.mark.parametrize("x", [1])
        def test_b(x): pass

        @mark(precisions=["bf16_pure"])
        def test_c(cell): pass

        @mark(world_size=3)
        def test_d(rank): pass
        """
    )
    result = pytester.runpytest_inprocess("--collect-only", "-q", "--strict-markers", "-p", "no:randomly")
    assert [line.partition("::")[2] for line in result.outlines if "::" in line] == [
        "test_a[ddp-fp32-w4]",
        "test_a[ddp-bf16_upcast-w4]",
        "test_a[fsdp2-fp32-w4]",
        "test_a[fsdp2-bf16_upcast-w4]",
        "test_b[fsdp1-fp32-w2-1]",
        "test_b[fsdp1-fp32-w2-state_dict_full-compile-1]",
        *(f"test_c[{strategy}-bf16_pure-w2]" for strategy in STRATEGIES.names()),
        "test_d",
    ]


def test_options_narrow_the_cells_of_a_mark(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(MARKED.format("strategies=['ddp', 'fsdp2'], precisions=['fp32', 'bf16_upcast']"))
    result = pytester.runpytest_inprocess("-v", "--distcompat-strategies=fsdp2", "--distcompat-precisions=bf16_upcast")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test[[]fsdp2-bf16_upcast-w2[]] PASSED*"])
    # Nothing is left: shown, not lost.
    result = pytester.runpytest_inprocess("-rs", "--distcompat-strategies=zero3")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*got empty parameter set*"])


def test_ranks_that_the_sessions_nodes_do_not_divide_are_not_run(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.distcompat(world_size=3)
        def test_three(): pass

        @pytest.mark.distcompat(world_size=3, nodes=1)
        def test_on_one(): pass
        """
    )
    result = pytester.runpytest_inprocess("-rs", "--distcompat-nodes=2")
    result.assert_outcomes(passed=1, skipped=1)
    assert [request.nodes for request in ranks.requests] == [1]
    reason = "3 ranks cannot be spread evenly over 2 nodes (--distcompat-nodes, option); nodes=1 in its mark runs them on one"
    result.stdout.fnmatch_lines([f"SKIPPED*: {reason}"])


def test_the_request_has_the_arguments_of_the_mark(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(
        """
        import pytest
        mark = pytest.mark.distcompat

        @mark
        def test_a(): pass

        @mark(world_size=3, timeout=1.5)
        @pytest.mark.parametrize("x", ["odd / id"])
        def test_b(x): pass

        @mark(world_size=3)
        class TestC:
            @mark(world_size=1)
            def test_the_nearest_mark_wins(self): pass
            def test_of_class(self): pass
        """
    )
    pytester.runpytest_inprocess("-p", "no:randomly", "--distcompat-timeout=9").assert_outcomes(passed=4)
    requests = [(r.payload["nodeid"].partition("::")[2], r.world_size, r.timeout) for r in ranks.requests]
    assert requests == [
        ("test_a", 2, 9),
        ("test_b[odd / id]", 3, 1.5),
        ("TestC::test_the_nearest_mark_wins", 1, 9),
        ("TestC::test_of_class", 3, 9),
    ]
    assert len({request.directory for request in ranks.requests}) == 4


def test_a_skip_that_the_parent_decides_starts_no_rank(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.distcompat(world_size=2)

        @pytest.mark.skip(reason="a")
        def test_a(): pass

        @pytest.mark.skipif(1 > 0, reason="b")
        def test_b(): pass

        @pytest.mark.xfail(run=False, reason="c")
        def test_c(): pass

        @pytest.fixture(autouse=True)
        def only_on_ranks(): raise AssertionError("set up in the parent")

        def test_d(no_such_fixture_in_the_parent): pass
        """
    )
    result = pytester.runpytest_inprocess("-rsx")
    result.assert_outcomes(skipped=2, xfailed=1, passed=1)
    result.stdout.fnmatch_lines_random(["SKIPPED*: a", "SKIPPED*: b", "XFAIL*NOTRUN*c"])
    assert len(ranks.requests) == 1


def test_conditions_on_rank_variables_are_evaluated_on_ranks(
    pytester: pytest.Pytester, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here there are none: ``get`` would give its default, which skips a test for ever."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(
        """
        import os
        import pytest
        pytestmark = pytest.mark.distcompat(world_size=2)

        def alone(): return int(os.getenv("WORLD_SIZE", "1")) < 2

        @pytest.mark.skipif("int(os.environ.get('WORLD_SIZE', 1)) < 2", reason="needs two")
        def test_default(): pass

        @pytest.mark.skipif("int(os.environ['RANK']) > 1", reason="needs a rank")
        def test_key(): pass

        @pytest.mark.skipif("alone()", reason="needs two")
        def test_function(): pass

        @pytest.mark.xfail("int(os.environ['RANK']) > 1", reason="on some")
        def test_xfail(): pass

        @pytest.mark.skipif("'RANK' not in os.environ", reason="needs a rank")
        class TestOfClass:
            def test_it(self): pass
        """
    )
    result = pytester.runpytest_inprocess("-rsx")
    result.assert_outcomes(passed=5)
    assert len(ranks.requests) == 5


@pytest.mark.parametrize("fixture", ["rank", "world_size", "world", "device", "shared_dir", "process_group"])
def test_a_fixture_of_ranks_in_an_ordinary_test_says_what_is_missing(fixture: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"def test({fixture}): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["fixture '*' is for tests that run on ranks; mark the test with @pytest.mark.distcompat(world_size=2)"]
    )


def test_the_cell_fixture_without_cells_says_what_is_missing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test(cell): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["fixture 'cell' needs @pytest.mark.distcompat(strategies=[[]...[]]) or precisions=, options="]
    )


def test_a_failed_rank_shows_its_report_and_the_commands(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    ranks.answer = lambda request: ranks.ending(
        (RankEnd(0, "stopped", "was killed by SIGTERM"), ()),
        (RankEnd(1, "raised", "raised failed: ValueError: no", text=">   raise ValueError", kind="failed"), ()),
    )
    pytester.makepyfile(
        MARKED.format("").replace("def test()", "@pytest.mark.parametrize('x', [\"it's $HOME\"])\ndef test(x)")
    )
    result = pytester.runpytest_inprocess(
        "--distcompat-gpus=0", "--distcompat-timeout=9", "--distcompat-strategies=ddp"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 failed: ValueError: no",
            "--- rank 1: failed: ValueError: no ---",
            ">   raise ValueError",
            "consequences:",
            "  rank 0 was killed by SIGTERM",
            # Quoted for a shell; options that select are left out.
            """reproduce: pytest '*.py::test[[]it'"'"'s $HOME[]]' --distcompat-gpus=0 --distcompat-timeout=9""",
            "this run alone: torchrun ...",
            # pytest 8 gives no reason that is a text.
            "FAILED *" + " - rank 1 failed: ValueError: no" * (pytest.version_tuple >= (9,)),
        ]
    )
    result.stdout.no_fnmatch_line("*plugin/marked/*")


def test_a_skip_on_all_ranks_is_reported_where_they_skipped(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    skip = ranks.phases(call=Phase("call", "skipped", "no need", location=("test_x.py", 3, "Skipped: no need")))
    ranks.answer = lambda request: ranks.ending((RankEnd(0, "done"), skip), (RankEnd(1, "done"), skip))
    pytester.makepyfile(MARKED.format(""))
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED [[]1[]] test_x.py:3: no need"])


def test_ranks_are_warmed_up_only_if_a_marked_test_will_run(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(MARKED.format("") + "\ndef test_unmarked(): pass")
    for args in (["--collect-only"], ["-k", "unmarked"], ["--deselect", "x"]):
        ranks.calls.clear()
        pytester.runpytest_inprocess(*args)
        assert ("warm_up" in ranks.calls) == (args[0] == "--deselect"), args


def test_the_reproduce_command_is_for_the_directory_where_pytest_was_started(
    pytester: pytest.Pytester, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.answer = lambda request: ranks.ending((RankEnd(0, "killed", "was killed by SIGKILL"), ()))
    pytester.makeini("[pytest]")
    path = pytester.makepyfile(MARKED.format(""))
    monkeypatch.chdir(pytester.mkdir("below"))
    for args in ([f"../{path.name}"], ["--pyargs", f"../{path.name}"]):
        result = pytester.runpytest_inprocess(*args)
        # Not of a module that lies elsewhere and has an import name, but of a file: by its path.
        result.stdout.fnmatch_lines([f"reproduce: pytest *{path.stem}*::test"])
        command = next(line for line in result.outlines if line.startswith("reproduce: "))
        assert command == f"reproduce: pytest ../{path.name}::test", args
