"""An ordinary test, on every rank."""

import pytest


@pytest.mark.distcompat(world_size=2)
def test_the_engine_knows_its_ranks(rank: int, world_size: int) -> None:
    import deepspeed
    import torch
    from deepspeed import comm

    deepspeed.init_distributed(dist_backend="gloo")
    assert (comm.get_rank(), comm.get_world_size()) == (rank, world_size)
    total = torch.tensor([rank + 1.0])
    comm.all_reduce(total)
    assert total.item() == 3
