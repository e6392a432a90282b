"""torch 2.13.0: under FSDP2 a first forward in ``torch.inference_mode`` makes each later one outside of it fail.

FSDP2 makes the tensors that it gathers parameters into at the first forward, and keeps them: made in inference mode they are
inference tensors, which the next gathering may not write to. So evaluation before training, as a sanity check, ends training.
Expected: the step works, as it does under DDP, FSDP1, and after ``no_grad``. Seen: ``Inplace update to inference tensor``.
"""

import os

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def rank(number: int) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29605"}
    distributed.init_process_group("gloo")
    model = torch.nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    with torch.inference_mode():
        model(torch.ones(1, 4))
    found = ""
    try:
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        found = str(error)
    if number == 0:
        print("SEEN" if "inference tensor" in found else "GONE", found or "the step works")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
