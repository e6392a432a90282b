"""torch 2.13.0: a model with an embedding that tensor parallelism cuts cannot be compiled as a whole beside FSDP2.

FSDP2's hooks break the graph, so that the embedding is a graph of its own. The mask in its output's placement, a tensor of one
trace, is kept with the cached placement; the next trace compares its own mask with it. Without FSDP2 the model
compiles. Expected: a step, as uncompiled. Seen: ``BackendCompilerFailed``, ``Mixing fake modes NYI``.
https://github.com/pytorch/torchtitan/issues/534
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29618",
    }
    distributed.init_process_group("gloo")
    model = nn.Sequential(nn.Embedding(8, 4))
    plan = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp_shard"])
    model = torch.compile(model, backend="aot_eager")
    try:
        model(torch.arange(8)[None]).square().sum().backward()
        found = ""
    except Exception as error:
        found = str(error)
    if number == 0:
        print("SEEN" if "Mixing fake modes" in found else "GONE", " ".join(found.split())[:200])
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
