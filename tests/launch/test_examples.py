"""The examples do what the documentation says of them: eight trainers in miniature, each with the suite and a marked test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.ext.upstream.drivers import _releases

pytestmark = pytest.mark.spawn

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Directory to the file that adopts the suite.
ADOPTERS = {
    "my_trainer": "test_my_trainer.py",
    "accelerate_trainer": "test_fine_tuner.py",
    "transformers_trainer": "test_accuracy_trainer.py",
    "deepspeed_loop": "test_loop.py",
    "lightning_fabric": "test_fabric_loop.py",
    "lightning_trainer": "test_lit_model.py",
    "trl_trainer": "test_sft_trainer.py",
    "torchtitan_trainer": "test_titan.py",
}
#: What the nightly job installs for an example: it brings pyarrow and pandas.
INSTALLED_NIGHTLY = {"trl_trainer": "trl", "torchtitan_trainer": "torchtitan"}
#: The others nightly.
DAILY = {"my_trainer"}


def run(pytester: pytest.Pytester, name: str, *args: str) -> pytest.RunResult:
    for path in (EXAMPLES / name).glob("*.py"):
        (pytester.path / path.name).write_text(path.read_text())
    return pytester.runpytest_subprocess("--strict-markers", "--distcompat-gpus=0", *args)


@pytest.mark.nightly
def test_marked_tests(pytester: pytest.Pytester) -> None:
    run(pytester, "marker").assert_outcomes(passed=7)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DAILY else pytest.mark.nightly) for name in ADOPTERS],
)
def test_an_adopter_in_miniature(pytester: pytest.Pytester, name: str) -> None:
    if name in INSTALLED_NIGHTLY:
        pytest.importorskip(INSTALLED_NIGHTLY[name], reason="the nightly job installs it")
    result = run(pytester, name, "--distcompat-profile=smoke")
    counts = result.parseoutcomes()
    # Upstream's own issues are expected failures; one test is marked, all others are the suite's.
    assert set(counts) <= {"passed", "xfailed"}, result.stdout.str()
    assert counts["passed"] > 4 * counts.get("xfailed", 0)
    result.stdout.fnmatch_lines([f"{sum(counts.values()) - 1} verdicts from * runs"])
    if name == "my_trainer":
        result.stdout.fnmatch_lines(["  refused: ValueError: my_trainer does not support strategy 'fsdp1'*"])


@pytest.mark.parametrize(("name", "file"), ADOPTERS.items())
def test_the_suite_is_adopted_in_ten_lines(name: str, file: str) -> None:
    text = (EXAMPLES / name / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    # Without the docstring.
    code = [line for line in text.splitlines()[tree.body[0].end_lineno :] if line.strip()]
    assert len(code) <= 10
    assert any("distcompat(" in path.read_text(encoding="utf-8") for path in (EXAMPLES / name).glob("test_*.py"))


@pytest.mark.nightly
def test_a_plain_script(pytester: pytest.Pytester) -> None:
    run(pytester, "plain_script").assert_outcomes(passed=2)


def test_without_trl_the_cells_of_its_example_are_skipped_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "trl_trainer"))
    monkeypatch.setattr(_releases, "installed", lambda package: package != "trl")
    driver = find_driver("sft_driver:SFTDriver")
    assert driver.unsupported_reason(Cell.parse("ddp-fp32-w2")) == "trl is not installed"


def test_every_adopter_is_run() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/*_driver.py")} == set(ADOPTERS)
