"""Ranks made by torch.multiprocessing, in a process that is none itself: nothing in the environment says who is which."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, how: str, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if how == "raise" and rank == 1:
        raise ValueError("in a rank that was made")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    start: Any = getattr(mp, "start_processes")  # noqa: B009 - torch does not say that it is there
    start(work, args=(sys.argv[2], sys.argv[3]), nprocs=2, start_method=sys.argv[1])
