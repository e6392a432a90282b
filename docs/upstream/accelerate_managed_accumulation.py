"""accelerate 1.15.0: DeepSpeed's ``managed_gradient_accumulation: false`` cannot be trained with.

It says that the caller owns where a step ends. accelerate's engine wrapper tells the engine all the
same, by ``set_gradient_accumulation_boundary``, in each ``backward``. Expected: a training, or a
refusal in ``prepare``. Seen: an AssertionError in the first backward pass.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29607"}

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "managed_gradient_accumulation": False,
}
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
)
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
try:
    accelerator.backward(model(torch.ones(1, 8)).sum())
except AssertionError as error:
    print(f"SEEN AssertionError: {error}")
else:
    print("GONE it trains")
