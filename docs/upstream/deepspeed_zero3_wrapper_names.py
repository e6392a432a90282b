"""DeepSpeed 0.19.8: what ZeRO-3 gathers for ``save_16bit_model`` keeps the name of the activation checkpointing wrapper.

The wrapper takes its name out of its own ``state_dict``, which DeepSpeed does not ask. Expected: ``0.weight``, as the model's
state dict has it. Seen: ``0._checkpoint_wrapped_module.weight``, which fits no model.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29583"}

import deepspeed
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(8, 8)), torch.nn.Linear(8, 8))
expected = sorted(model.state_dict())
zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[0]
with tempfile.TemporaryDirectory() as place:
    engine.save_16bit_model(place, "weights.bin")
    found = sorted(torch.load(f"{place}/weights.bin"))

print("SEEN" if found != expected else "GONE", f"{found}; expected {expected}")
