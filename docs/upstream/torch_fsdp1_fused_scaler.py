"""torch 2.13.0: FSDP1's gradient scaler and a fused optimizer do not go together where gradients are clipped.

Expected: a step. Seen: ``output with shape [] doesn't match the broadcast shape [1]``, for ``ShardedGradScaler.unscale_`` keeps
what it finds in a tensor of one dimension, which ``AdamW(fused=True)`` takes off its count of steps, a scalar.
https://github.com/pytorch/pytorch/issues/140514. Fused is the default of transformers.Trainer.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29584",
}

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

distributed.init_process_group("gloo")
model = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = ShardedGradScaler("cpu")
scaler.scale(model(torch.ones(1, 8)).sum()).backward()
# As whoever clips has to.
scaler.unscale_(optimizer)
try:
    scaler.step(optimizer)
except RuntimeError as error:
    print("SEEN", error)
else:
    print("GONE")
distributed.destroy_process_group()
