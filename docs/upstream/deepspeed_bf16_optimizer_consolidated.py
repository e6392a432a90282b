"""DeepSpeed 0.19.8: zero_to_fp32 does not read a ZeRO-1 checkpoint in bf16 whose gradients are added up in fp32.

Expected: the float32 weights, as with ``grad_accum_dtype`` left alone. Seen: ``ValueError: ... is not a zero checkpoint``.
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581"}

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(8, 8)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_allow_untested_optimizer": True,
}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[0]
engine.backward(engine(torch.ones(1, 8).bfloat16()).sum())
engine.step()
with tempfile.TemporaryDirectory() as place:
    engine.save_checkpoint(place)
    try:
        print("GONE", sorted(get_fp32_state_dict_from_zero_checkpoint(place)))
    except ValueError as error:
        print("SEEN", error)
