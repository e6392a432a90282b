"""The fixture ``distcompat`` in somebody's tests."""

from __future__ import annotations

import sys

import pytest

from .conftest import PROGRAMS

TESTS = f"""
import sys

ENDS = [{str(PROGRAMS / "start_ranks.py")!r}, "2", {str(PROGRAMS / "ends.py")!r}]

def test_well(distcompat):
    run = distcompat.launch(sys.executable, *ENDS, "well", launcher="cli")
    assert str(run.directory).startswith(str(run.directory.parents[1]))

def test_raises(distcompat):
    distcompat.launch(sys.executable, *ENDS, "raise", launcher="cli")

def test_limit(distcompat):
    distcompat.launch(sys.executable, *ENDS, "hang", launcher="cli", timeout=3)
"""


@pytest.mark.spawn
def test_verdicts_are_those_of_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_subprocess("-p", "no:randomly", "--distcompat-gpus", "0")
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(
        ["*RunFailedError: rank 1 raised ValueError: rank 1 does not want to*", "*time limit of 3 s*"]
    )


def test_a_wrong_number_of_ranks_fails_the_test(pytester: pytest.Pytester) -> None:
    """It was compared with numbers before anybody had looked at it: a bare TypeError."""
    pytester.makepyfile(f"""
        def test_it(distcompat):
            script = {str(PROGRAMS / "ends.py")!r}
            distcompat.resume_roundtrip(script, [], resume=[], save_at=1, total=2, world_size="2")
    """)
    done = pytester.runpytest_inprocess("--distcompat-gpus", "0")
    done.stdout.fnmatch_lines(["*UsageProblem: world_size='2': expected a number of ranks, 1 or more*"])
    done.stdout.no_fnmatch_line("*pytest_distcompat/*")
    done.stdout.fnmatch_lines(["test_a_wrong_number_of_ranks_fails_the_test.py:*: UsageProblem"])


@pytest.mark.parametrize(
    "call", ["launch(__file__, strategy='fsdp9')", "launch(__file__, strategy='ddp', options={'x': 1})"]
)
def test_a_usage_error_shows_the_line_of_the_test(pytester: pytest.Pytester, call: str) -> None:
    pytester.makepyfile(f"def test_it(distcompat):\n    distcompat.{call}\n")
    done = pytester.runpytest_inprocess("--distcompat-gpus", "0")
    done.stdout.fnmatch_lines(["test_a_usage_error_shows_the_line_of_the_test.py:2: UsageProblem"])
    done.stdout.no_fnmatch_line("*pytest_distcompat/*")


def test_an_error_of_ours_shows_our_frames(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"""
        from pytest_distcompat.ext.scripts import launching

        def test_it(distcompat, monkeypatch):
            monkeypatch.setattr(launching, "command_line", None)
            distcompat.launch({str(PROGRAMS / "ends.py")!r})
    """)
    done = pytester.runpytest_inprocess("--distcompat-gpus", "0")
    done.stdout.fnmatch_lines(["*pytest_distcompat/ext/scripts/launching.py:*: TypeError"])


def test_what_an_idle_session_imports(pytester: pytest.Pytester) -> None:
    """The plugin's own module, and nothing that it needs to launch."""
    pytester.makepyfile(
        """
        import sys

        def test():
            imported = {name for name in sys.modules if name.startswith("pytest_distcompat.ext.scripts")}
            assert imported <= {"pytest_distcompat.ext.scripts", "pytest_distcompat.ext.scripts.plugin"}
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    assert sys.executable
