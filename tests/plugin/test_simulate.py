"""``--distcompat-simulate``: labelled as weaker than real ranks everywhere."""

from __future__ import annotations

import json

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.ext.simulation.substitute import Simulation

SUITE = """
from pytest_distcompat import CompatSuite, Matrix

class TestMine(CompatSuite):
    driver = "torch"
    matrix = Matrix(("fsdp2", "ddp"), ("fp32",), options=({"model": "mlp"},))
"""
MARKED = """
import pytest

@pytest.mark.distcompat
def test_marked(): pass
"""


@pytest.mark.spawn
def test_a_simulated_verdict_is_no_pass(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE, test_marked=MARKED)
    result = pytester.runpytest_subprocess(
        "--distcompat-simulate=64", "--distcompat-report=r.json", "--distcompat-report=r.html", "-rs"
    )
    result.assert_outcomes(skipped=7)
    result.stdout.fnmatch_lines(
        [
            "distcompat: simulated: 64 ranks*no values are computed",
            "*fsdp2-fp32-w64-model_mlp * simulated *",
            "*weaker than ok: simulated: no values were computed*",
            "*not run: ddp needs values and peers*",
            "SKIPPED * simulated: a marked test needs ranks",
        ]
    )
    report = json.loads((pytester.path / "r.json").read_text(encoding="utf-8"))
    assert {result["status"] for result in report["results"]} == {"simulated", "skipped"}
    row = next(cell for cell in report["cells"] if cell["cell"].startswith("fsdp2"))
    assert row["not_applicable"]["parity"] == "simulated: no values were computed"
    assert len(row["tensor_bytes"]["parameters"]) == 64
    assert {sending["mesh"] for sending in row["sent"]} == {"dp_shard"}
    assert "simulated: no values were computed" in (pytester.path / "r.html").read_text(encoding="utf-8")


def test_ranks_that_form_no_mesh_are_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_suite=SUITE.replace('options=({"model": "mlp"},)', 'world_sizes=(4,), options=({"tp": 4},)')
    )
    result = pytester.runpytest("--distcompat-simulate=6")
    result.stdout.fnmatch_lines(["*--distcompat-simulate 6: tp 4 does not divide 6 ranks; with these tp can be 1, 2*"])


@pytest.mark.parametrize(("option", "is_simulated"), [("ema", True), ("param_groups", True), ("lora", False)])
def test_options_of_a_cell_that_are_simulated(option: str, is_simulated: bool) -> None:
    cell = Cell.parse(f"fsdp2-fp32-w64-{option}")
    reason = Simulation(64).why_not_supported(DRIVERS.get("torch"), cell)
    expected = None if is_simulated else f"option {option!r} needs values, or was not simulated yet"
    assert reason == expected
