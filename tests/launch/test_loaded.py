"""Models that the trainer makes itself start as the given one on real ranks, whichever way they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.engine import local_runner
from pytest_distcompat.judge import judge
from pytest_distcompat.status import Status

CELLS = (
    ("deepspeed", "zero3-fp32-w2-loaded_from_backbone"),
    ("deepspeed", "zero3-fp32-w2-model_mlp-loaded_zero_init"),
    ("deepspeed", "zero3-bf16_upcast-w2-loaded_from_config"),
    ("accelerate", "zero3-fp32-w2-loaded_from_pretrained-lora"),
    ("accelerate", "fsdp2-fp32-w2-cpu_ram_efficient_loading-loaded_from_pretrained"),
    ("trainer", "zero3-fp32-w2-loaded_from_pretrained"),
)

pytestmark = pytest.mark.spawn


@pytest.mark.parametrize(
    ("driver", "cell_id"),
    [pytest.param(*cell, marks=[] if number < 2 else pytest.mark.nightly) for number, cell in enumerate(CELLS)],
)
def test_it_starts_as_the_given_one(driver: str, cell_id: str, tmp_path: Path) -> None:
    cell = Cell.parse(cell_id)
    check = CHECKS.get("start")
    with local_runner(find_driver(driver), [cell], device="cpu", store=tmp_path) as runner:
        execution = check.execute(runner, driver, find_driver(driver), cell)
    verdict = judge(check, cell, execution.trace)
    assert (verdict.status, verdict.message) == (Status.PASSED, "")
