"""An ordinary test, on every rank."""

import pytest


@pytest.mark.distcompat(world_size=2)
def test_accelerate_gathers_what_each_rank_has(rank: int, world_size: int) -> None:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, world_size)
    assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]
