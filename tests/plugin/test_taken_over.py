"""A marked test runs on its ranks, whoever else would like to call it, and wherever it lies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spawn

CONFTEST = """
import asyncio
import inspect
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True

class Own(pytest.Function):
    def runtest(self):
        self.obj(**{name: self.funcargs[name] for name in inspect.signature(self.obj).parameters})

def pytest_pycollect_makeitem(collector, name, obj):
    if name.startswith("check_"):
        return Own.from_parent(collector, name=name)
"""
TESTS = """
import os
import pytest
from hypothesis import given, settings, strategies

pytestmark = pytest.mark.distcompat(world_size=2, timeout=30)

@pytest.fixture(scope="module")
def of_ranks():
    return int(os.environ["RANK"])

async def test_called_by_a_hook(rank):
    assert rank == 0

async def test_called_by_a_hook_without_fixtures():
    assert os.environ["RANK"] == "0"

def check_called_by_its_class(rank):
    assert rank == 0

@settings(max_examples=3, deadline=None)
@given(number=strategies.integers(0, 5))
def test_called_by_hypothesis(of_ranks, number):
    assert of_ranks == 0

def test_{long}(rank):
    assert rank == 0
"""


@pytest.mark.nightly
def test_on_all_ranks(pytester: pytest.Pytester) -> None:
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_it.py").write_text(TESTS.format(long="long" * 60))
    # Torch imports modules of these names, and not from where it was started.
    for name in ("cmd", "profile"):
        (pytester.path / f"{name}.py").write_text('raise SystemExit("usage: of a script")')
    # Not by pytester, which has PYTHONPATH say that directory.
    script = [str(Path(sys.executable).with_name("pytest")), "--distcompat-gpus=0", "-rf"]
    result = subprocess.run(script, cwd=pytester.path, capture_output=True, text=True, check=False)
    lines = pytest.LineMatcher(result.stdout.splitlines())
    # And no warning that the fork server died.
    lines.fnmatch_lines(["=* 5 failed in *"])
    for name in ("by_a_hook", "by_a_hook_without_fixtures", "by_its_class", "by_hypothesis"):
        lines.fnmatch_lines_random([f"FAILED *called_{name} - rank 1 failed: *assert *"])


def test_a_test_that_no_rank_received_has_not_passed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_runtest_setup(item):
            item.runtest = lambda: None
    """)
    pytester.makepyfile("""
        import pytest

        @pytest.mark.distcompat(world_size=2)
        def test_it(rank):
            assert rank == 0
    """)
    result = pytester.runpytest_subprocess("--distcompat-gpus=0")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["no rank ran this test: somebody else's *"])


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_surrogates_and_paths_do_not_end_the_session(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    """Of text, and in ``sys.path``, where Python passes over what is no string."""
    pytester.makeconftest("import pathlib, sys; sys.path.insert(0, pathlib.Path(__file__).parent)")
    pytester.makepyfile(r"""
        import logging
        import pytest

        pytestmark = pytest.mark.distcompat(world_size=2)

        def test_log(rank):
            logging.getLogger().warning("odd \udcff")
            assert rank == 0

        def test_skip(rank):
            pytest.skip("odd \udcff")

        def test_property(rank, record_property):
            record_property("odd", "\udcff")

        def test_strict(rank, request):
            request.applymarker(pytest.mark.xfail(strict=True, reason="odd \udcff"))
    """)
    # Hypothesis wants strings only.
    result = pytester.runpytest_subprocess("--distcompat-gpus=0", "-p", "no:hypothesispytest", *workers)
    result.assert_outcomes(failed=2, skipped=1, passed=1)
    result.stdout.fnmatch_lines(["*odd \\udcff*"])
