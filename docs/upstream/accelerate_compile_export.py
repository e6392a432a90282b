"""accelerate 1.15.0: get_state_dict of a compiled model under DDP has keys with ``_orig_mod.``, which save_model writes.

Expected: the model's own names, as save_state writes them. Seen: ``_orig_mod.weight``.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29576",
}

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin

accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
model = accelerator.prepare(torch.nn.Linear(4, 4))
found = sorted(accelerator.get_state_dict(model))
print(
    "SEEN" if any("_orig_mod" in name for name in found) else "GONE",
    f"{type(model).__name__}: {found}",
)
