"""DeepSpeed 0.19.8: ``load_checkpoint`` under ZeRO-1 and ZeRO-2 leaves the optimizer's state unreadable.

``safe_get_full_optimizer_state`` looks in a table that an engine's first step fills. A load makes a new one, which no later step
fills. Expected: Adam's first moment, as it was saved. Seen: ``TypeError: argument of type 'NoneType' is not iterable``, however
many steps follow; in a fresh engine that loads, until its first step.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29647"}

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")


found = {}
with tempfile.TemporaryDirectory() as directory:
    for stage in (1, 2):
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            try:
                found[stage] = str(safe_get_full_optimizer_state(model.weight, "exp_avg"))
            except TypeError as error:
                found[stage] = f"TypeError: {error}"
            engine.save_checkpoint(directory, tag=str(stage))
            engine.load_checkpoint(directory, tag=str(stage))

print("SEEN" if any("TypeError" in one for one in found.values()) else "GONE", found)
