"""DeepSpeed 0.19.8: ``param_shapes`` of a ZeRO checkpoint, and what ``zero_to_fp32`` makes of it, keep the name of the
activation checkpointing wrapper.

The wrapper takes its name out of its own ``state_dict``; DeepSpeed reads ``named_parameters``. Expected: ``0.weight``. Seen:
``0._checkpoint_wrapped_module.weight``, so that the consolidated weights fit no model.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29587"}

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(8, 8)), torch.nn.Linear(8, 8))
expected = sorted(model.state_dict())
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[0]
with tempfile.TemporaryDirectory() as place:
    engine.save_checkpoint(place)
    found = sorted(get_fp32_state_dict_from_zero_checkpoint(place))

print("SEEN" if found != expected else "GONE", f"{found}; expected {expected}")
