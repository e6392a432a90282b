"""DeepSpeed 0.19.8: under ZeRO a schedule that the caller made has no effect on torch's Adagrad.

ZeRO makes a second Adagrad for its flat partitions, with the first one's defaults, and the schedule keeps changing the first
one. Expected: the learning rate of the optimizer that steps follows the schedule. Seen: it stays what it was.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29592"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adagrad(model.parameters(), lr=1.0)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
engine, used, _, _ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    config=config,
)
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
rate = used.optimizer.param_groups[0]["lr"]
print(
    f"{'SEEN' if rate == 1.0 else 'GONE'} the rate after a step is {rate}, and that of the schedule 0.5"
)
