"""Models that the trainer makes itself start as the given one on real ranks, whichever way they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.engine import local_runner
from pytest_distcompat.judge import judge
from pytest_distcompat.status import Status, Verdict

CELLS = (
    ("deepspeed", "zero3-fp32-w2-model_mlp-loaded_zero_init"),
    ("deepspeed", "zero3-fp32-w2-loaded_from_backbone"),
    ("deepspeed", "zero3-bf16_upcast-w2-loaded_from_config"),
    ("accelerate", "zero3-fp32-w2-loaded_from_pretrained-lora"),
    ("accelerate", "fsdp2-fp32-w2-cpu_ram_efficient_loading-loaded_from_pretrained"),
    ("trainer", "zero3-fp32-w2-loaded_from_pretrained"),
)

pytestmark = pytest.mark.spawn


@pytest.mark.parametrize(
    ("driver", "cell_id"),
    [pytest.param(*cell, marks=[] if number < 1 else pytest.mark.nightly) for number, cell in enumerate(CELLS)],
)
def test_it_starts_as_the_given_one(driver: str, cell_id: str, tmp_path: Path) -> None:
    verdict = start(driver, Cell.parse(cell_id), tmp_path)
    assert (verdict.status, verdict.message) == (Status.PASSED, "")


@pytest.mark.nightly
def test_a_refusal_leaves_no_files_outside_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks end where the library raises: rank 0 did not remove the directory of the model's files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    cell = Cell.of("zero3", "fp32", loaded="from_pretrained", set="from_pretrained.device_map=auto")
    verdict = start("deepspeed", cell, tmp_path / "store")
    assert verdict.status == Status.REFUSED, verdict.message
    assert "device_map" in verdict.reason
    assert not list(temporary.rglob("config.json"))


def start(driver: str, cell: Cell, store: Path) -> Verdict:
    """Return the verdict on whether a model starts as the given one."""
    check = CHECKS.get("start")
    with local_runner(find_driver(driver), [cell], device="cpu", store=store) as runner:
        execution = check.execute(runner, driver, find_driver(driver), cell)
    return judge(check, cell, execution.trace)
