"""DeepSpeed 0.19.8: ``deepspeed.zero.Init(dtype=torch.float32)`` makes a model in bfloat16 where float16 is not supported.

``_set_dtype`` reads ``dtype or float16 if float16 is supported else bfloat16 if is_bf16_supported else float32``: the
condition is about all that stands before it, and the last name is a function that is not called. So on such a device, a
CPU here, the argument counts for nothing. Expected: what is made has the dtype that is asked for, and so do the weights
that are put into it. Seen: bfloat16, to which the values are rounded. https://github.com/deepspeedai/DeepSpeed/pull/8428
calls the function, after which the argument still counts for nothing where bfloat16 is supported.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29645"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
    layer = torch.nn.Linear(8, 8)
print("deepspeed", deepspeed.__version__)
print("GONE" if layer.weight.dtype is torch.float32 else "SEEN", layer.weight.dtype)
