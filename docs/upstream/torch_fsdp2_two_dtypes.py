"""torch 2.13.0: fully_shard takes a unit of two dtypes under a mixed-precision policy, and refuses in the first forward only.

Expected: an error where the mistake is made, as with FSDP1. Seen: ``FSDP expects uniform original parameter dtype`` from forward.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29579",
}

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

distributed.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
model[0].bfloat16()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
try:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
except (AssertionError, ValueError) as error:
    print("GONE", error)
else:
    try:
        model(torch.ones(1, 8))
        print("GONE it works")
    except AssertionError as error:
        print("SEEN", error)
distributed.destroy_process_group()
