"""torch 2.13.0: under FSDP2 ``zero_grad`` does not discard gradients that were added up without synchronisation.

``set_requires_gradient_sync(False)`` keeps them beside the parameters, unsharded (``FSDPParam.unsharded_accumulated_grad``),
where ``optimizer.zero_grad()`` does not reach: the batch that was discarded is part of the next synchronised gradient.
accelerate's ``no_sync`` has it too. Expected: the second batch's gradient, as under DDP and FSDP1. Seen: the sum of both.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29601",
}

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 1, bias=False)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model.set_requires_gradient_sync(False)
model(torch.tensor([[100.0, 100.0]])).sum().backward()
optimizer.zero_grad()  # the user skips this batch: its loss was not finite, say
model.set_requires_gradient_sync(True)
model(torch.tensor([[1.0, 2.0]])).sum().backward()

found = model.weight.grad.full_tensor().tolist()
print(
    "SEEN" if found != [[1.0, 2.0]] else "GONE", f"the gradient is {found}; expected [[1.0, 2.0]]"
)
distributed.destroy_process_group()
