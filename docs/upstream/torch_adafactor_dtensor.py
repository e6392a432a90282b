"""torch 2.13.0: ``torch.optim.Adafactor`` cannot step on a model of FSDP2.

It squares a norm in place, whose placement is partial: "in-place operations that require placement changes are not supported".
Expected: a step, as AdamW, SGD and Muon take one. Seen: RuntimeError, for every parameter that is a matrix.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29565"}
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo")
mesh = distributed.init_device_mesh("cpu", (1,))
model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adafactor(model.parameters())
model(torch.ones(2, 4)).sum().backward()
try:
    optimizer.step()
    print("GONE it took a step")
except RuntimeError as error:
    print("SEEN" if "in-place" in str(error) else "OTHER", str(error).splitlines()[0])
distributed.destroy_process_group()
