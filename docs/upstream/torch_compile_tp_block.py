"""torch 2.13.0: the gradient of what comes before a compiled block is lost where tensor parallelism hands its output over.

The output of ``RowwiseParallel`` is an ``AsyncCollectiveTensor``. A block that ``compile`` compiles, of layers that are cut too,
takes it as an input without a gradient: no error, and the layers before the block do not learn. Without the plan for the block,
backward raises ``'Tensor' object has no attribute '_local_tensor'``. Expected: the gradient that it has uncompiled. Seen: None.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29617",
    }
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(8, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    )
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    plan = {"0": embedding, "1.0": ColwiseParallel(), "1.2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    model[1].compile(backend="aot_eager")
    try:
        model(torch.arange(8)[None]).square().sum().backward()
        gradient = model[0].weight.grad
        found = "the embedding has no gradient" if gradient is None else ""
    except AttributeError as error:
        found = str(error)
    if number == 0:
        print("SEEN" if found else "GONE", found)
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
