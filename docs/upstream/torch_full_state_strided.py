"""torch 2.13.0: a whole state dict cannot be loaded where FSDP2 and tensor parallelism cut one dimension unevenly.

Under ``ColwiseParallel`` and ``fully_shard`` on a mesh of 2 x 2 a bias is ``(_StridedShard(0, 2), Shard(0))``. With
``full_state_dict=True`` every rank distributes the whole tensor, for which ``_StridedShard`` wants pieces of one size: of 6
elements each rank of tensor parallelism has 3, and its shards have 2 and 1. Expected: what was saved, as with 8 elements. Seen:
an ``AssertionError`` without a word. Sharded checkpoints load. Mended for other uneven cuts:
https://github.com/pytorch/pytorch/pull/150490.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

WHOLE = StateDictOptions(full_state_dict=True)


def loads(size: int, mesh: distributed.device_mesh.DeviceMesh) -> bool:
    model = nn.Sequential(nn.Linear(3, size))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    try:
        set_model_state_dict(model, get_model_state_dict(model, options=WHOLE), options=WHOLE)
    except AssertionError:
        return False
    return True


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29671",
    }
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {size: loads(size, mesh) for size in (8, 6)}
    if number == 0:
        print("SEEN" if found == {8: True, 6: False} else "GONE", found)
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 4)
