"""What the DeepSpeed driver makes of ``load_checkpoint`` and of a schedule; both are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.ext.upstream.drivers._deepspeed_checkpoints import _command_line
from pytest_distcompat.ext.upstream.drivers.deepspeed import _ScheduleOfEach
from pytest_distcompat.world import World


def driver_of(**engine: Any) -> DeepSpeedDriver:
    """Return a driver with an engine of these methods and attributes."""
    driver = DeepSpeedDriver(Cell.parse("zero2-fp32-w2-model_mlp"), World(0, 2, 0, "cpu"))
    driver.model = SimpleNamespace(**engine)
    return driver


def load(directory: Path, state: dict[str, Any] | None, file: str = "global_step3/mp_rank_00_model_states.pt") -> None:
    path = str(directory / file) if file else None
    driver_of(load_checkpoint=lambda *_, **__: (path, state)).load(directory)


@pytest.mark.parametrize("state", [{}, {"ranks": 4}], ids=["of another", "of more ranks"])
def test_random_state_that_was_not_saved_is_not_loaded(state: dict[str, Any], tmp_path: Path) -> None:
    load(tmp_path, state)


def test_nothing_is_loaded_where_deepspeed_found_no_checkpoint(tmp_path: Path) -> None:
    load(tmp_path, None, file="")


def test_random_state_that_is_lost_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"global_step3/rng_0\.pt"):
        load(tmp_path, {"ranks": 2})


def test_each_checkpoint_keeps_its_own_random_state(tmp_path: Path) -> None:
    driver = driver_of(save_checkpoint=lambda *_, **__: None, global_steps=3)
    torch.manual_seed(5)
    driver.save(tmp_path)
    expected = torch.rand(1)
    driver.model.global_steps = 6
    driver.save(tmp_path)
    driver.model.load_checkpoint = lambda *_, **__: (None, None)
    driver.load_first(tmp_path)
    assert torch.rand(1) == expected


class RateOfFirst:
    """A schedule that sets all param groups to a part of the first one's learning rate."""

    def __init__(self, optimizer: Any, factor: float) -> None:
        self.groups = optimizer.param_groups
        self.rate = self.groups[0]["lr"] * factor

    def step(self) -> None:
        for group in self.groups:
            group["lr"] = self.rate


def test_the_reference_schedules_each_group_by_itself() -> None:
    groups = [{"params": [1], "lr": 1.0, "weight_decay": 0.1}, {"params": [2], "lr": 2.0, "weight_decay": 0.0}]
    schedule = _ScheduleOfEach(SimpleNamespace(param_groups=groups), RateOfFirst, {"factor": 0.5})
    schedule.step()
    assert groups == [
        {"params": [1], "lr": 0.5, "weight_decay": 0.1},
        {"params": [2], "lr": 1.0, "weight_decay": 0.0},
    ]


def test_a_process_has_its_own_command_line_again() -> None:
    own = sys.argv
    with _command_line(["convert", "--unknown"]):
        assert sys.argv == ["convert", "--unknown"]
    assert sys.argv is own
