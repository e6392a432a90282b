"""torch 2.13.0: FSDP2 on a mesh of one rank divides gradients twice by ``set_gradient_divide_factor``.

So it is with ``set_force_sum_reduction_for_comms(True)``, without which gloo cannot use a factor, and with gradients in float16:
a reduction of one rank divides by the factor itself, and what divides after the reduction divides again. The experts of expert
parallelism have such a mesh where all data parallel ranks hold experts together. Expected: half of it. Seen: a quarter.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29619",
}

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo")
layer = torch.nn.Linear(4, 1, bias=False)
fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
layer.set_gradient_divide_factor(2.0)
layer.set_force_sum_reduction_for_comms(True)
layer(torch.ones(1, 4)).sum().backward()
found = layer.weight.grad.full_tensor().flatten().tolist()
print("GONE" if found == [0.5] * 4 else "SEEN", found)
distributed.destroy_process_group()
