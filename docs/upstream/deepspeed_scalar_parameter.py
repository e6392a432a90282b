"""DeepSpeed 0.19.8: `initialize` cannot take a parameter of no dimension, as CLIP's `logit_scale`, or a transposed one.

`_broadcast_model` calls `p.data.view(torch.uint8)`, which needs a last dimension that is contiguous. Expected: every parameter
is broadcast (`p.data.contiguous().reshape(-1).view(torch.uint8)` and copied back). Seen: RuntimeError, in all stages.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29575"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

found = []
for parameter in (torch.tensor(1.5), torch.randn(13, 5).t()):
    model = torch.nn.Linear(8, 8)
    model.extra = torch.nn.Parameter(parameter)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    try:
        deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
        )
    except RuntimeError as error:
        found.append(str(error))

print("SEEN" if len(found) == 2 else "GONE", found)
