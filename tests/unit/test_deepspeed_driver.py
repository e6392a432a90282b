"""What the DeepSpeed driver makes of ``load_checkpoint`` and of a schedule; both are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.ext.upstream.drivers.deepspeed import _OneSchedule
from pytest_distcompat.world import World


def load(directory: Path, state: dict[str, Any] | None) -> None:
    driver = DeepSpeedDriver(Cell.parse("zero2-fp32-w2-model_mlp"), World(0, 2, 0, "cpu"))
    driver.model = SimpleNamespace(load_checkpoint=lambda *_, **__: (None, state))
    driver.load(directory)


@pytest.mark.parametrize("state", [None, {}, {"ranks": 4}], ids=["not found", "of another", "of more ranks"])
def test_random_state_that_was_not_saved_is_not_loaded(state: dict[str, Any] | None, tmp_path: Path) -> None:
    load(tmp_path, state)


def test_random_state_that_is_lost_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"rng_0\.pt"):
        load(tmp_path, {"ranks": 2})


class FirstGroupAlone:
    """A schedule that forgets all param groups but the first."""

    def __init__(self, optimizer: Any, rate: float) -> None:
        self.first = optimizer.param_groups[0]
        self.first["lr"] = 0.0
        self.rate = rate

    def step(self) -> None:
        self.first["lr"] += self.rate


def test_the_reference_has_the_rates_of_the_first_group_in_all_groups() -> None:
    groups = [{"params": [1], "lr": 1.0, "weight_decay": 0.1}, {"params": [2], "lr": 1.0, "weight_decay": 0.0}]
    schedule = _OneSchedule(SimpleNamespace(param_groups=groups), FirstGroupAlone, {"rate": 0.5})
    assert [group["lr"] for group in groups] == [0.0, 0.0]
    schedule.step()
    assert groups == [
        {"params": [1], "lr": 0.5, "weight_decay": 0.1},
        {"params": [2], "lr": 0.5, "weight_decay": 0.0},
    ]
