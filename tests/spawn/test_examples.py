"""The examples that the documentation shows do what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.spawn

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "passed"), [("my_trainer", 30), ("marker", 7)])
def test_example(pytester: pytest.Pytester, name: str, passed: int) -> None:
    for path in (EXAMPLES / name).glob("*.py"):
        (pytester.path / path.name).write_text(path.read_text())
    result = pytester.runpytest_subprocess("--strict-markers")
    result.assert_outcomes(passed=passed)
    if name == "my_trainer":
        result.stdout.fnmatch_lines(["*30 verdicts from 10 process-group lives"])
        result.stdout.fnmatch_lines(["  refused: ValueError: my_trainer does not support strategy 'fsdp1'*"])
