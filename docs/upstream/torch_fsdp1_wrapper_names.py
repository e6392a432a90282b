"""torch 2.13.0: ``FullyShardedDataParallel.optim_state_dict`` takes its own names out of those of the model's modules.

Expected: a model with a child named ``_fsdp_wrapped_module`` or ``_checkpoint_wrapped_module`` has optimizer state with the names
of its parameters. Seen: ``0.weight`` instead of ``0._fsdp_wrapped_module.weight``, which is no name of the model.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29603",
}

import collections

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

distributed.init_process_group("gloo")
layers = collections.OrderedDict(_fsdp_wrapped_module=torch.nn.Linear(8, 8))
model = torch.nn.Sequential(torch.nn.Sequential(layers))
expected = sorted(name for name, _ in model.named_parameters())
settings = {"auto_wrap_policy": ModuleWrapPolicy({torch.nn.Linear}), "use_orig_params": True}
wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **settings)
optimizer = torch.optim.AdamW(wrapped.parameters())
wrapped(torch.ones(1, 8)).sum().backward()
optimizer.step()
found = sorted(FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)["state"])
distributed.destroy_process_group()

print("SEEN" if found != expected else "GONE", f"{found}; expected {expected}")
