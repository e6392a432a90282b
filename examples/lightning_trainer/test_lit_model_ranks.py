"""An ordinary test, on every rank: Trainer finds the ranks that are there, and starts none."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.distcompat(world_size=2)
def test_ranks_stay_equal(rank: int, tmp_path: Path) -> None:
    import torch
    from lit_model import LitModel, Rows
    from pytorch_lightning import Trainer
    from torch import distributed

    torch.manual_seed(0)
    model = LitModel()
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, default_root_dir=tmp_path, **quiet)
    trainer.fit(model, Rows([(torch.randn(8, 4) + rank, torch.zeros(8, 2))] * 2))
    assert (trainer.global_rank, trainer.global_step) == (rank, 2)
    sums: list[Any] = [None, None]
    distributed.all_gather_object(sums, sum(float(parameter.detach().sum()) for parameter in model.parameters()))
    assert sums[0] == sums[1]
