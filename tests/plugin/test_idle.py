"""Installed and unused, the plugin costs nothing and says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import RunPytest

#: What only a distributed test needs.
HEAVY = ("torch", "psutil", "pynvml", "filelock", "pytest_distcompat.launch", "pytest_distcompat.runner")
CONFTEST = f"""
import sys

def pytest_unconfigure(config):
    found = [name for name in {HEAVY!r} if name in sys.modules]
    print("process loaded", found)
    assert not found, found
"""
TESTS = """
import sys

class Base:
    def helper(self): pass

class TestX(Base):
    def test(self, tmp_path): pass

def test_fixtures_of_other_plugins_may_have_our_names(request): pass
"""


@pytest.fixture
def suite_directory(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_x.py").write_text(TESTS, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("args", [[], ["-n", "1"], ["--collect-only"]], ids=["alone", "xdist", "collect"])
def test_an_idle_session_imports_nothing_heavy_and_prints_nothing(
    args: list[str], suite_directory: Path, run_pytest: RunPytest
) -> None:
    run = run_pytest(suite_directory, *args)
    assert run.code == pytest.ExitCode.OK, run.out
    assert "process loaded []" in run.out
    assert not [line for line in run.out.splitlines() if line.startswith("distcompat")]
    assert not (suite_directory / "basetemp" / "distcompat").exists()


def test_an_option_imports_no_torch_and_at_most_nvml(suite_directory: Path, run_pytest: RunPytest) -> None:
    (suite_directory / "conftest.py").write_text(CONFTEST.replace("'pynvml', ", ""), encoding="utf-8")
    run = run_pytest(suite_directory, "--distcompat-gpus=auto", "--distcompat-strategies=ddp", "--distcompat-timeout=3")
    assert run.code == pytest.ExitCode.OK, run.out


def test_switched_off(suite_directory: Path, run_pytest: RunPytest) -> None:
    run = run_pytest(suite_directory, "-p", "no:distcompat")
    assert run.code == pytest.ExitCode.OK, run.out
    assert set(run.outcomes.values()) == {"passed"}
    assert run_pytest(suite_directory, "-p", "no:distcompat", "--distcompat-gpus=0").code == pytest.ExitCode.USAGE_ERROR


def test_fixtures_of_the_same_names_in_a_conftest_win(pytester: pytest.Pytester) -> None:
    names = ("rank", "world", "world_size", "device", "cell", "shared_dir", "process_group")
    made = "\n".join(f"@pytest.fixture\ndef {name}(): return 'mine'" for name in names)
    pytester.makeconftest(f"import pytest\n{made}")
    pytester.makepyfile(f"def test({', '.join(names)}): assert {{{', '.join(names)}}} == {{'mine'}}")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
