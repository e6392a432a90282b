"""Known issues of scripts: an exception in a run can be declared, a crash or a hang cannot, however the test goes on from it."""

from __future__ import annotations

import pytest

from pytest_distcompat.ext.scripts.events import Saved
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.hosting import Hosted

Pytester = pytest.Pytester

MESSAGE = "KeyError: '_orig_mod.x'"
#: How the ranks of a script can end, in those words, and what the test then is.
ENDINGS = [
    pytest.param(RankEnd(0, "raised", MESSAGE), "xfailed", id="raised"),
    pytest.param(RankEnd(0, "killed", MESSAGE), "failed", id="crashed"),
    pytest.param(RankEnd(0, "stuck", text=MESSAGE), "failed", id="hung"),
]
#: What a test does with a script whose run fails so.
USES = {
    "launch": "distcompat.launch('train.py')",
    "round trip": "distcompat.resume_roundtrip('train.py', [], resume=[], save_at=1, total=2)",
    "checked": "distcompat.launch('train.py', strategy='ddp', allow_failure=True).check('active')",
    "raised from it": """
    try:
        distcompat.launch('train.py')
    except Exception as failure:
        raise RuntimeError(str(failure)) from failure""",
    "raised instead of it": """
    try:
        distcompat.launch('train.py')
    except Exception as failure:
        raise RuntimeError(str(failure)) from None""",
}


def declare_known(pytester: Pytester) -> Pytester:
    """Write a known issue and a script to run."""
    issue = "version = 1\n[[issue]]\nmatch = \"KeyError: '_orig_mod\"\nreason = 'org/repo#1'"
    (pytester.path / "known.toml").write_text(issue, encoding="utf-8")
    pytester.makeini("[pytest]\ndistcompat_known = known.toml")
    pytester.makepyfile(train="")
    return pytester


def end(monkeypatch: pytest.MonkeyPatch, *ends: RankEnd) -> None:
    """Replace the runs of scripts by these endings in turn; the last one repeats."""
    left = list(ends)

    def run(hosted: Hosted) -> Ending:
        end_of_run = left.pop(0) if left[1:] else left[0]
        saved = Saved("here", STRIDE, everyone=True)
        return Ending((end_of_run,), {0: [saved]}, timed_out=end_of_run.status == "stuck", command="cli")

    monkeypatch.setattr(Hosted, "run", run)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("ending", "outcome"), ENDINGS)
def test_a_failing_script_that_matches_an_entry_is_known(
    ending: RankEnd, outcome: str, use: str, pytester: Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(monkeypatch, ending)
    declare_known(pytester).makepyfile(f"def test(distcompat):\n    {USES[use]}")
    pytester.runpytest_inprocess().assert_outcomes(**{outcome: 1})


@pytest.mark.parametrize(("ending", "outcome"), ENDINGS)
def test_an_xfail_mark_excuses_no_crash_of_a_script(
    ending: RankEnd, outcome: str, pytester: Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(monkeypatch, ending)
    pytester.makepyfile(
        train="", test_it=f"import pytest\n@pytest.mark.xfail\ndef test(distcompat):\n    {USES['launch']}"
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(**{outcome: 1})
    if outcome == "failed":
        result.stdout.fnmatch_lines(["E *RunFailedError: *"])


@pytest.mark.parametrize(("ending", "outcome"), ENDINGS)
def test_a_failing_resume_that_matches_an_entry_is_known(
    ending: RankEnd, outcome: str, pytester: Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(monkeypatch, RankEnd(0, "done"), RankEnd(0, "done"), ending)
    declare_known(pytester).makepyfile(f"def test(distcompat):\n    {USES['round trip']}")
    result = pytester.runpytest_inprocess("-rxf")
    result.assert_outcomes(**{outcome: 1})
    if outcome == "failed":
        result.stdout.fnmatch_lines(["*the run that was to go on from here failed*"])


def test_an_expected_crash_is_no_failure_of_the_test(pytester: Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    end(monkeypatch, RankEnd(0, "killed", MESSAGE))
    declare_known(pytester).makepyfile(
        """
        import pytest, unittest
        from pytest_distcompat import RunFailedError

        def test(distcompat):
            with pytest.raises(RunFailedError, match="_orig_mod") as found:
                distcompat.launch("train.py")
            assert found.value.hard

        class TestUnit(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _scripts(self, distcompat):
                self.launch = distcompat.launch

            def test_expected(self):
                with self.assertRaises(RunFailedError):
                    self.launch("train.py")

            def test_crashes(self):
                self.launch("train.py")
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["FAILED *::TestUnit::test_crashes - *"])


def test_a_declared_finding_in_a_script_is_known(pytester: Pytester) -> None:
    pytester.makepyfile(
        """
        from pytest_distcompat import Incompatible
        def test(distcompat): raise Incompatible("names (fsdp2-fp32-w2): KeyError: '_orig_mod.x'")
        """
    )
    declare_known(pytester).runpytest_inprocess().assert_outcomes(xfailed=1)
