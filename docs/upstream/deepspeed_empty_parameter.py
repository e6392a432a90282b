"""DeepSpeed 0.19.8: a parameter without elements breaks ZeRO-3's first forward, and is lost by zero_to_fp32 for ZeRO-1.

https://github.com/deepspeedai/DeepSpeed/pull/8467 is about the same parameters in the optimizers of bf16 and fp16.
Expected: it is ignored. Seen: an AssertionError on one rank, on more `torch.cat(): expected a non-empty list of Tensors`; and a
consolidated checkpoint without it.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29576"}

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 8))

    def forward(self, x):
        return self.layer(x).sum() + self.nothing.sum()


found = {}
for stage in (1, 3):
    model = Model()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.backward(engine(torch.ones(1, 8)))
        engine.step()
        with tempfile.TemporaryDirectory() as place:
            engine.save_checkpoint(place)
            names = get_fp32_state_dict_from_zero_checkpoint(place)
        found[stage] = "complete" if "nothing" in names else f"consolidated: {sorted(names)}"
    except (AssertionError, RuntimeError, ValueError) as error:
        found[stage] = str(error)

print("GONE" if set(found.values()) == {"complete"} else "SEEN", found)
