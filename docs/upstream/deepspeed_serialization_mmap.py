"""DeepSpeed 0.19.8: zero_to_fp32 cannot read a checkpoint that was saved with ``checkpoint_serialization`` false.

The setting saves in torch's older format, and zero_to_fp32 opens files with ``mmap``, which needs the newer one. Expected: the
weights, as with the setting true. Seen: ``mmap can only be used with files saved with ...``.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29594"}

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
config["checkpoint"] = {"checkpoint_serialization": False}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[0]
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
with tempfile.TemporaryDirectory() as place:
    engine.save_checkpoint(place)
    try:
        get_fp32_state_dict_from_zero_checkpoint(place)
    except RuntimeError as error:
        print(f"SEEN {str(error)[:80]}")
    else:
        print("GONE it is read")
