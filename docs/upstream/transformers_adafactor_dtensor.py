"""transformers 5.23.0: ``transformers.optimization.Adafactor`` cannot step on a model of FSDP2.

It makes the factors of the second moment by ``torch.zeros``: plain tensors, to which it adds means of a DTensor. Trainer makes
this optimizer by ``optim="adafactor"``, under FSDP2 too. Expected: a step, or a refusal by Trainer. Seen: RuntimeError in the
first step, for every parameter that is a matrix.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29636"}
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers.optimization import Adafactor

distributed.init_process_group("gloo")
mesh = distributed.init_device_mesh("cpu", (1,))
model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=mesh)
optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)
model(torch.ones(2, 4)).sum().backward()
try:
    optimizer.step()
    print("GONE it took a step")
except RuntimeError as error:
    print(
        "SEEN" if "mixed torch.Tensor and DTensor" in str(error) else "OTHER",
        str(error).splitlines()[0],
    )
distributed.destroy_process_group()
