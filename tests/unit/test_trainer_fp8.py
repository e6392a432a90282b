"""How Trainer is asked for products in 8 bits, for which TrainingArguments have no word."""

from __future__ import annotations

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.upstream.drivers.trainer import TrainerDriver
from pytest_distcompat.world import World

pytest.importorskip("transformers")

#: By default torchao prepares weights for an all-gather in 8 bits, which is FSDP2's alone: accelerate then trains other
#: parameters than it computes with.
ALL_GATHER = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"


@pytest.mark.parametrize(("strategy", "value"), [("ddp", "false"), ("fsdp1", "false"), ("fsdp2", None)])
def test_weights_are_gathered_in_8_bits_by_fsdp2_alone(strategy: str, value: str | None) -> None:
    driver = TrainerDriver(Cell(strategy, "fp8", 2), World(0, 2, 0, "cpu"))
    variables = driver.environment()
    assert variables["ACCELERATE_MIXED_PRECISION"] == "fp8"
    assert variables.get(ALL_GATHER) == value


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
def test_deepspeed_by_trainer_computes_in_bfloat16_or_in_8_bits(strategy: str) -> None:
    assert "takes no fp8" in str(TrainerDriver.unsupported_reason(Cell(strategy, "fp8", 2)))
    assert TrainerDriver.unsupported_reason(Cell(strategy, "bf16_upcast", 2)) is None
