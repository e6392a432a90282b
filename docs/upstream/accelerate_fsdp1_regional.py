"""accelerate 1.15.0: regional compilation of an FSDP1 model is a RecursionError.

Expected: each block compiled, as under FSDP2. Seen: compile_regions makes an FSDP1 module without calling its ``__init__``.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29580",
}

import torch
from accelerate.utils import compile_regions
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel

distributed.init_process_group("gloo")
model = torch.nn.Sequential(
    torch.nn.Linear(8, 8), torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
)
wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
try:
    compile_regions(wrapped, backend="eager")
    print("GONE")
except RecursionError as error:
    print("SEEN", error)
distributed.destroy_process_group()
