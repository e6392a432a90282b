"""torch 2.13.0: FSDP2 reduces a block that is used twice after each use, once gradients were added up before.

Without earlier micro-batches the gradient of a block is reduced once, after its last use. With one that was not synchronised
(``set_requires_gradient_sync(False)``) the accumulated gradient is there already after the first use: it is reduced with
that, and the second use is reduced alone. The sum is right, and costs twice. Expected: one reduce-scatter, as without
accumulation. Seen: two.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(rows)).sum()


def reductions(earlier: int) -> int:
    """Return how many reductions a backward pass has after so many without synchronisation."""
    model = Twice()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_requires_gradient_sync(False)
    for _ in range(earlier):
        model(torch.ones(1, 2)).backward()
    model.set_requires_gradient_sync(True)
    with profile() as recorded:
        model(torch.ones(1, 2)).backward()
    names = [event.name for event in recorded.events()]
    return names.count("c10d::_reduce_scatter_base_")


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29674",
    }
    distributed.init_process_group("gloo")
    alone = reductions(0)
    accumulated = reductions(1)
    if number == 0:
        print(
            "SEEN" if accumulated > alone else "GONE",
            f"{accumulated} reductions of one block, {alone} without accumulation",
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
