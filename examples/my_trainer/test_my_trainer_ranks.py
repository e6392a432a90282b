"""An ordinary test, on every rank."""

from typing import Any

import pytest


@pytest.mark.distcompat(world_size=2)
def test_fsdp2_splits_the_weights(process_group: Any, rank: int) -> None:
    import my_trainer
    import torch
    from torch import nn

    trainer = my_trainer.Trainer(nn.Linear(4, 3), strategy="fsdp2", dtype=None, device=torch.device("cpu"))
    weight: Any = trainer.model.get_parameter("weight")
    # Three rows over two ranks: two and one.
    assert weight.to_local().shape == ((2, 4) if rank == 0 else (1, 4))
