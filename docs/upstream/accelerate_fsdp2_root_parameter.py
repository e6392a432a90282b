"""accelerate 1.15.0: FSDP2 with ``cpu_ram_efficient_loading`` cannot prepare a plain module with parameters of its own.

Only transformers' models have ``get_parameter_or_buffer``; for others a name is split at its last dot, and a name at the root
has none. Expected: the model is prepared, as without the option. Seen: ``not enough values to unpack`` in ``prepare``.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29593",
}
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin

# accelerate takes FSDP for accelerators only; this has it on the CPU.
PartialState(cpu=True)
PartialState().distributed_type = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=True
)
accelerator = Accelerator(fsdp_plugin=plugin)
net = torch.nn.Linear(8, 8)
try:
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
except ValueError as error:
    print(f"SEEN {error}")
else:
    print("GONE it is prepared")
torch.distributed.destroy_process_group()
