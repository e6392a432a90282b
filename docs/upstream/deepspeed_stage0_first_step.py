"""DeepSpeed 0.19.8: bf16 without ZeRO takes a real AdamW step when the engine is made.

Expected before any training: no step, the master 1.0. Seen: Adam's step is 1 and weight decay has been applied.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29575"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
_, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

master = wrapped.optimizer.param_groups[0]["params"][0]
step, value = float(wrapped.optimizer.state[master]["step"]), float(master.detach()[0, 0])
print(
    "SEEN" if step or value != 1.0 else "GONE",
    f"before any training Adam's step is {step:g}, the master weight {value:g}",
)
