"""An ordinary test, on every rank: Fabric finds the process group that is there."""

import pytest


@pytest.mark.distcompat(world_size=2)
def test_ranks_add_up(rank: int) -> None:
    import torch
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    assert fabric.global_rank == rank
    assert float(torch.as_tensor(fabric.all_reduce(torch.tensor(rank + 1.0), reduce_op="sum"))) == 3.0
