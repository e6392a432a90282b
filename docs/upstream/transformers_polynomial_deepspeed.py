"""transformers 5.23.0: the schedule ``polynomial`` cannot be made for an optimizer of DeepSpeed, for which Trainer makes it.

It reads ``optimizer.defaults``, which DeepSpeed's optimizers do not have. Expected: a schedule, as the other ones. Seen:
AttributeError before the first step of ``TrainingArguments(lr_scheduler_type="polynomial")`` under ZeRO.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29594"}

import deepspeed
import torch
from transformers import get_scheduler

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
optimizer = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[1]
try:
    get_scheduler("polynomial", optimizer, num_warmup_steps=0, num_training_steps=20)
    print("GONE it is made")
except AttributeError as error:
    print("SEEN", error)
except TypeError as error:
    print("OTHER", error)
