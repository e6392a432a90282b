"""accelerate 1.15.0, torchao 0.18.0, DeepSpeed 0.19.8: the default torchao recipe of mixed_precision="fp8" fails under DeepSpeed.

Expected: layers in 8 bits, or a refusal. Seen: RuntimeError: _apply(): Couldn't swap Float8Linear.weight. A recipe without
all-gather in 8 bits works.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import AORecipeKwargs

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}
accelerator = Accelerator(
    mixed_precision="fp8",
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
    kwargs_handlers=[AORecipeKwargs(), InitProcessGroupKwargs(backend="gloo")],
)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
try:
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
except RuntimeError as error:
    print("SEEN", error)
else:
    print("GONE")
