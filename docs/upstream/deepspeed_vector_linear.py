"""DeepSpeed 0.19.8: ZeRO-3 cannot go backward through `functional.linear` with a weight of one dimension, as in D-FINE.

ZeRO-3 replaces `torch.nn.functional.linear` by a function of its own, whose backward pass multiplies by the weight as a matrix.
Expected: the gradient that torch computes, for a weight that is no parameter too. Seen: RuntimeError.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29583"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")


class Expectation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)

    def forward(self, rows):
        return torch.nn.functional.linear(self.layer(rows), torch.arange(3.0)).sum()


model = Expectation()
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
config["zero_allow_untested_optimizer"] = True
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)
found = ""
try:
    engine.backward(engine(torch.ones(4, 8)))
except RuntimeError as error:
    found = str(error)

print("SEEN" if found else "GONE", found)
