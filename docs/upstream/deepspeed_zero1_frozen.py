"""DeepSpeed 0.19.8: zero_to_fp32 leaves the frozen parameters of a ZeRO-1 checkpoint out, without a word.

Expected: all four tensors, as for ZeRO-2 and 3. Seen: the two trained ones.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29574"}

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
model[0].requires_grad_(requires_grad=False)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model[1].parameters()), config=config
)[0]
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
with tempfile.TemporaryDirectory() as place:
    engine.save_checkpoint(place)
    found = sorted(get_fp32_state_dict_from_zero_checkpoint(place))

print("SEEN" if len(found) < 4 else "GONE", f"consolidated: {found}")
