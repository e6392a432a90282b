"""torch 2.13.0: set_optimizer_state_dict of a compiled FSDP1 model with flat parameters is an AssertionError.

Expected: the state loaded, as into the model that is not compiled. Seen: ``Expected 1 FQN for '_orig_mod._flat_param'``.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29578",
}

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

distributed.init_process_group("gloo")
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
wrapped = FullyShardedDataParallel(layers, use_orig_params=False, device_id=torch.device("cpu"))
model = torch.compile(wrapped, backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
state = get_optimizer_state_dict(model, optimizer)
set_optimizer_state_dict(wrapped, optimizer, state)  # not compiled: works
try:
    set_optimizer_state_dict(model, optimizer, state)
    print("GONE")
except AssertionError as error:
    print("SEEN", error)
distributed.destroy_process_group()
