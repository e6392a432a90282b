"""torch 2.13.0: fully_shard and FSDP1 take a parameter without elements, and fail after the first forward.

Expected: it is ignored, or `fully_shard` refuses it as it refuses scalar parameters. Seen: FSDP2's backward raises `_chunk_cat
expects non-empty tensor`; FSDP1 trains, and its optimizer state dict cannot be taken: "nothing is not in the optimizer state".
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29577",
}

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

distributed.init_process_group("gloo")
mesh = distributed.init_device_mesh("cpu", (1,))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 8))

    def forward(self, x):
        return self.layer(x).sum() + self.nothing.sum()


found = {}
for name, wrap in {
    "FSDP2": lambda model: fully_shard(model, mesh=mesh),
    "FSDP1": lambda model: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
}.items():
    model = wrap(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        model(torch.ones(1, 8)).backward()
        optimizer.step()
        get_optimizer_state_dict(model, optimizer)
    except RuntimeError as error:
        found[name] = str(error).splitlines()[0]
distributed.destroy_process_group()

print("SEEN" if found else "GONE", found)
