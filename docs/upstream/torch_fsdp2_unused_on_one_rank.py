"""torch 2.13.0: FSDP2 cannot train where one rank does not use a parameter that another uses.

A unit's reduce-scatter has the gradients that a rank has. Expected: zeros for the others, as FSDP1 and DDP's
`find_unused_parameters` have it, or an error that says so. Seen: sizes differ between ranks, and gloo aborts one in the first
step (https://github.com/pytorch/pytorch/issues/158719).
"""

import os

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29605"}

import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard

RANKS = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.branch = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, needed):
        x = self.layer(x)
        return self.branch(x) if needed else x


def rank(number):
    distributed.init_process_group("gloo", rank=number, world_size=RANKS)
    model = fully_shard(Model(), mesh=distributed.init_device_mesh("cpu", (RANKS,)))
    model(torch.ones(1, 8), number == 1).sum().backward()
    distributed.barrier()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(number,)) for number in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
    print("SEEN" if any(codes) or None in codes else "GONE", f"exit codes {codes}")
