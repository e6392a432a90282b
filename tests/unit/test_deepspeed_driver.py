"""What the DeepSpeed driver makes of the answers of ``load_checkpoint``; the engine is a stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
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
