"""torch 2.13.0: ``torch.optim.SGD(fused=True)`` cannot step on a model of FSDP2.

The fused operator has no sharding strategy, which those of Adam have. Expected: a step, or an error when the optimizer is made.
Seen: NotImplementedError in the first step.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29593"}
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), fused=True)
model(torch.ones(2, 4)).sum().backward()
try:
    optimizer.step()
    print("GONE it took a step")
except NotImplementedError as error:
    print("SEEN" if "_fused_sgd_" in str(error) else "OTHER", str(error).splitlines()[0])
distributed.destroy_process_group()
