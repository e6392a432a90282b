"""Hooks of marked tests are this plugin's, which conftests come before and around."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugin.conftest import RunPytest

pytestmark = pytest.mark.spawn

CONFTEST = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    assert "process_group" in item.fixturenames

@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    from pytest_distcompat.ext.reuse.plugin import SHARED_RANKS

    yield
    # A rank shares none.
    shared = item.config.stash.get(SHARED_RANKS, None)
    assert shared is None or shared.scope == ""
"""
TEST = """
import pytest

@pytest.mark.distcompat(world_size=2, reuse="module")
def test_it(process_group):
    pass
"""


@pytest.mark.nightly
def test_a_conftest_sees_fixtures_before_and_no_kept_ranks_after(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TEST, encoding="utf-8")
    run = run_pytest(tmp_path)
    assert run.outcomes == {"test_it": "passed"}, run.out
