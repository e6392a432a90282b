"""The adapters that cells with option ``lora`` train: LoRA, or the method of PEFT that a setting names."""

from __future__ import annotations

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.world import World


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("", {"lora_A", "lora_B"}),
        ("-set_PeftConfig.peft_type=ADALORA+PeftConfig.total_step=20", {"lora_A", "lora_B", "lora_E"}),
        ("-set_PeftConfig.peft_type=OFT", {"oft_R"}),
    ],
)
def test_a_setting_names_the_method(setting: str, names: set[str]) -> None:
    driver = AccelerateDriver(Cell.parse(f"ddp-fp32-w1-lora{setting}"), World(0, 1, 0, "cpu"))
    trained = set()
    for name, parameter in driver.build_model().named_parameters():
        if parameter.requires_grad:
            before, _, _ = name.partition(".default")
            trained.add(before.rpartition(".")[2])
    assert trained == names
