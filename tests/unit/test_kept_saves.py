"""Which built-in drivers keep several checkpoints in one directory, and which end with their best one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import find_driver, unsupported_reason
from pytest_distcompat.ext.upstream.drivers.accelerate import _named_checkpoints
from pytest_distcompat.ext.upstream.drivers.trainer import _first_checkpoint

BEST = "TrainingArguments.load_best_model_at_end=true"
NAMED = "ProjectConfiguration.automatic_checkpoint_naming=true"


@pytest.mark.parametrize(
    ("driver", "cell", "kept"),
    [
        ("torch", "fsdp2-fp32-w2", False),
        ("deepspeed", "zero2-fp32-w2", True),
        ("deepspeed", "zero2-fp32-w2-set_save_checkpoint.tag=mine", False),
        ("accelerate", "ddp-fp32-w2", False),
        ("accelerate", f"ddp-fp32-w2-set_{NAMED}", True),
        ("accelerate", f"ddp-fp32-w2-set_ProjectConfiguration.total_limit=1+{NAMED}", False),
        ("accelerate", f"ddp-fp32-w2-set_ProjectConfiguration.total_limit=2+{NAMED}", True),
        ("trainer", "ddp-fp32-w2", True),
        ("trainer", "ddp-fp32-w2-set_TrainingArguments.save_total_limit=0", True),
        ("trainer", "ddp-fp32-w2-set_TrainingArguments.save_total_limit=1", False),
        ("trainer", "ddp-fp32-w2-set_TrainingArguments.save_total_limit=2", True),
        ("trainer", "ddp-fp32-w2-set_train.resume_from_checkpoint=true", False),
    ],
)
def test_whether_a_second_save_leaves_the_first(driver: str, cell: str, kept: bool) -> None:
    assert find_driver(driver).keeps_saves(Cell.parse(cell)) is kept


def test_checkpoints_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / "checkpoints" / f"checkpoint_{number}").mkdir(parents=True)
    assert _first_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    assert [path.name for path in _named_checkpoints(tmp_path)] == ["checkpoint_9", "checkpoint_10"]


@pytest.mark.parametrize(
    ("cell", "runs"),
    [
        (f"ddp-fp32-w2-model_mlp-set_{BEST}", True),
        (f"zero2-fp32-w2-model_mlp-set_{BEST}", True),
        (f"fsdp2-fp32-w2-model_mlp-state_dict_full-set_{BEST}", True),
        (f"fsdp2-fp32-w2-model_mlp-set_{BEST}", False),
    ],
)
def test_where_trainer_finds_its_best_checkpoint(cell: str, runs: bool) -> None:
    driver = find_driver("trainer")
    assert driver.loads_best(Cell.parse(cell))
    reason = unsupported_reason(driver, Cell.parse(cell), "cpu")
    assert (reason is None) == runs
    assert runs or "transformers_best_sharded.py" in str(reason)
