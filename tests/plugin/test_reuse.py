"""Tests that share ranks: which do, what they share, and how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.ext.reuse.keeper import RankKeeper

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugin.conftest import FakeRanks, Run, RunPytest

    from pytest_distcompat.ext.reuse.reused_ranks import Reuse
    from pytest_distcompat.launch.forensics.ending import Ending
    from pytest_distcompat.launch.request import Request

BODIES = """
import os
import pytest

shared = pytest.mark.distcompat(world_size=2, reuse="module")
MADE = []

@pytest.fixture(scope="module")
def made():
    MADE.append(os.getpid())
    yield MADE
    with open(f"torn down", "a") as file:
        file.write("once\\n")

@shared
@pytest.mark.parametrize("number", range(3))
def test_one(made, number, process_group, record_property):
    record_property("pid", os.getpid())
    assert made == [os.getpid()]

@shared
def test_leaves_a_variable(made, record_property):
    record_property("pid", os.getpid())
    os.environ["LEFT"] = "1"

@shared
def test_after_it(made, record_property):
    record_property("pid", os.getpid())
    assert "LEFT" not in os.environ
    assert made == [os.getpid()]

@pytest.mark.distcompat(world_size=2, reuse="never")
def test_alone(record_property):
    record_property("pid", os.getpid())

@pytest.mark.distcompat(world_size=3, reuse="session")
def test_another_size(record_property):
    record_property("pid", os.getpid())

@pytest.mark.distcompat(world_size=3, reuse="session")
@pytest.mark.skip(reason="not on ranks at all")
def test_skipped():
    pass
"""
OTHER = """
import os
import pytest

@pytest.mark.distcompat(world_size=3, reuse="session")
def test_in_another_module(record_property):
    record_property("pid", os.getpid())
"""


@pytest.fixture(scope="module")
def run(run_pytest: RunPytest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("reuse")
    (directory / "test_a.py").write_text(BODIES, encoding="utf-8")
    (directory / "test_b.py").write_text(OTHER, encoding="utf-8")
    return run_pytest(directory, "test_a.py", "test_b.py")


def properties(run: Run, name: str) -> dict[str, Any]:
    return dict(run.of(name)["properties"])


@pytest.mark.spawn
def test_consecutive_tests_share_ranks(run: Run) -> None:
    assert run.code == 0, run.out
    pids = {name: properties(run, name)["pid"] for name in run.outcomes if name != "test_skipped"}
    first = pids["test_one[0]"]
    assert {pids[name] for name in ("test_one[1]", "test_one[2]", "test_leaves_a_variable")} == {first}
    assert pids["test_in_another_module"] == pids["test_another_size"]
    others = [pids["test_after_it"], pids["test_alone"], pids["test_another_size"]]
    assert len({first, *others}) == 4


@pytest.mark.spawn
def test_fixtures_of_the_module_live_as_long_as_its_ranks(run: Run) -> None:
    # Two ranks, twice.
    assert (run.directory / "torn down").read_text(encoding="utf-8").splitlines() == ["once"] * 4


@pytest.mark.spawn
def test_the_reason_why_ranks_ended_early_is_a_property(run: Run) -> None:
    key = "distcompat: ranks left"
    assert (
        properties(run, "test_leaves_a_variable")[key]
        == "on all ranks it left the environment (LEFT set to '1') changed"
    )
    assert not [name for name in run.outcomes if key in properties(run, name) and name != "test_leaves_a_variable"]


@pytest.mark.nightly
@pytest.mark.spawn
def test_reuse_limit_is_the_number_of_tests(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_b.py").write_text(
        OTHER.replace("def test", "@pytest.mark.parametrize('n', range(3))\ndef test").replace("(record", "(n, record"),
        encoding="utf-8",
    )
    run = run_pytest(tmp_path, "--distcompat-reuse-limit=2")
    assert run.code == 0, run.out
    pids = [properties(run, name)["pid"] for name in run.outcomes]
    assert pids[0] == pids[1] != pids[2]
    assert properties(run, list(run.outcomes)[1])["distcompat: ranks left"] == "they did 2 requests"


FAILING = """
import pytest

pytestmark = pytest.mark.distcompat(world_size=2, reuse="module")

@pytest.fixture(scope="module")
def trainer():
    yield
    raise AssertionError("a checkpoint half written")

def test_first(trainer):
    pass

def test_second(trainer):
    pass

@pytest.mark.skip(reason="not today")
def test_skipped(trainer):
    pass
"""


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_failing_shared_teardown_is_the_error_of_the_last_test(run_pytest: RunPytest, tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(FAILING, encoding="utf-8")
    run = run_pytest(tmp_path)
    failed = [(report["nodeid"], report["when"]) for report in run.reports if report.get("outcome") == "failed"]
    # Before ranks of the next module come, and at the end of all.
    assert failed == [(f"test_{name}.py::test_skipped", "teardown") for name in "ab"], run.out
    assert run.code == pytest.ExitCode.TESTS_FAILED
    texts = [report["text"] for report in run.reports if report.get("outcome") == "failed"]
    for text in texts:
        assert text.startswith("ranks that tests shared did not leave well: "), text
        assert "AssertionError: a checkpoint half written" in text
    assert "DistcompatWarning" not in run.out


XFAILS = """
import pytest
pytestmark = pytest.mark.distcompat(world_size=2, reuse="module")

@pytest.fixture(scope="module")
def trainer():
    yield
    raise RuntimeError("the trainer does not close")

def test_first(trainer):
    pass

def test_xfails(trainer):
    pytest.xfail("not yet")
"""


@pytest.mark.nightly
@pytest.mark.spawn
def test_an_xfail_on_all_ranks_leaves_fixtures_to_be_torn_down(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_xfails.py").write_text(XFAILS, encoding="utf-8")
    run = run_pytest(tmp_path)
    assert run.outcomes == {"test_first": "passed", "test_xfails": "failed"}, run.out
    assert "failed in teardown: RuntimeError: the trainer does not close" in run.text("test_xfails")


def test_a_wrong_word_names_the_right_ones(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.distcompat(world_size=2, reuse='class')\ndef test_it(): pass\n")
    result = pytester.runpytest()
    result.stdout.fnmatch_lines(["*test_it: @pytest.mark.distcompat(reuse='class'): known are never, module, session*"])


@pytest.fixture
def scopes_seen(ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each run of ranks that are made up: its scope, empty for one with ranks of its own."""
    seen: list[str] = []

    def answer(request: Request) -> Ending:
        seen.append("")
        return ranks.well(request.world_size)

    def run(_: RankKeeper, request: Request, reuse: Reuse) -> Ending:
        seen.append(reuse.scope)
        return ranks.well(request.world_size)

    ranks.can_open = True
    ranks.answer = answer
    monkeypatch.setattr(RankKeeper, "run", run)
    return seen


@pytest.mark.parametrize(
    ("ini", "args", "scopes"),
    [
        ("never", [], ["", "session  2", "session  3"]),
        ("module", [], ["module test_it.py 2", "session  2", "session  3"]),
        ("module", ["--distcompat-reuse=never"], ["", "session  2", "session  3"]),
        ("never", ["--distcompat-reuse=session"], ["session  2", "session  2", "session  3"]),
    ],
)
def test_the_mark_wins_over_the_option(
    ini: str, args: list[str], scopes: list[str], pytester: pytest.Pytester, scopes_seen: list[str]
) -> None:
    pytester.makeini(f"[pytest]\ndistcompat_reuse = {ini}\n")
    pytester.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.distcompat(world_size=2)
        def test_a(): pass
        @pytest.mark.distcompat(world_size=2, reuse="session")
        def test_b(): pass
        @pytest.mark.distcompat(world_size=3, reuse="session")
        def test_c(): pass
        """
    )
    assert pytester.runpytest(*args).ret == 0
    assert scopes_seen == scopes


OFF = ("-p", "no:distcompat-reuse")


def test_without_the_plugin_the_mark_has_no_such_argument(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.distcompat(world_size=2, reuse='module')\ndef test_it(): pass\n")
    pytester.runpytest(*OFF).stdout.fnmatch_lines(["*has no argument 'reuse'. Known: *options, timeout"])


def test_without_the_plugin_its_options_are_gone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    assert "--distcompat-reuse" not in pytester.runpytest(*OFF, "--help").stdout.str()
    assert pytester.runpytest(*OFF, "--distcompat-reuse=session").ret == pytest.ExitCode.USAGE_ERROR


def test_without_the_plugin_each_test_has_its_own_ranks(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    ranks.can_open = True
    pytester.makepyfile("import pytest\n@pytest.mark.distcompat(world_size=2)\ndef test_it(): pass\n")
    pytester.runpytest(*OFF).assert_outcomes(passed=1)
    assert len(ranks.requests) == 1
    pytester.runpytest(*OFF, "--markers").stdout.fnmatch_lines(["*distcompat(*timeout=SECONDS): run the test on*"])
