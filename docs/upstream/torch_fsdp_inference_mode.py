"""torch 2.13.0: under FSDP1 and FSDP2 a first forward in ``torch.inference_mode`` makes each later one outside of it fail.

FSDP makes the tensors that it gathers parameters into at the first forward, and keeps them: made in inference mode they are
inference tensors, which the next gathering may not write to. So evaluation before training, as a sanity check, ends training.
Expected: the step works, as under DDP, and after ``no_grad``. Seen: ``Inplace update to inference tensor``, or under FSDP1
``The `grad_fn` is needed`` (https://github.com/pytorch/pytorch/issues/113203, closed).
"""

import os

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def step(version: int) -> str:
    model = torch.nn.Linear(4, 2)
    if version == 1:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    with torch.inference_mode():
        model(torch.ones(1, 4))
    try:
        model(torch.ones(1, 4)).sum().backward()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition(".")[0]
    return ""


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29605",
    }
    distributed.init_process_group("gloo")
    found = {f"FSDP{version}": step(version) for version in (1, 2)}
    if number == 0:
        print("SEEN" if any(found.values()) else "GONE", found)
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
