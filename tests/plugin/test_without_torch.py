"""Without torch: what is missing is said first, and how to get it."""

from __future__ import annotations

import pytest

from pytest_distcompat.installed import GET_TORCH

#: As in an environment without torch, for every Python process that has this file on its path.
HIDES_TORCH = """
import importlib.metadata, importlib.util, sys

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def find_distributions(self, context=None):
        return ()

sys.meta_path.insert(0, Hides())
find_spec, distributions = importlib.util.find_spec, importlib.metadata.distributions
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
importlib.metadata.distributions = lambda **given: () if given.get("name") == "torch" else distributions(**given)
"""


@pytest.fixture
def bare(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(sitecustomize=HIDES_TORCH)
    return pytester


def test_the_command_of_the_readme(bare: pytest.Pytester) -> None:
    result = bare.runpytest_subprocess("--pyargs", "pytest_distcompat.suite", "--distcompat-profile", "smoke")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "no cell ran, so nothing was checked; expected at least one verdict",
            "  TestTorch: no cell of TestTorch can run here: torch is not installed",
            f"  install it: {GET_TORCH}",
        ]
    )
    result.stdout.no_fnmatch_line("*matrix is empty*")


def test_a_marked_test(bare: pytest.Pytester) -> None:
    bare.makepyfile("import pytest\n@pytest.mark.distcompat\ndef test(): pass")
    result = bare.runpytest_subprocess()
    result.stdout.fnmatch_lines([f"the ranks could not be started: torch is not installed: {GET_TORCH}"])
