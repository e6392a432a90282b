"""accelerate 1.15.0: FSDP2 with ``cpu_ram_efficient_loading`` cannot prepare a model that has a persistent buffer.

Reported as https://github.com/huggingface/accelerate/issues/3898, closed without a fix. Every entry of the state dict is taken
for a DTensor, and buffers are not sharded. Expected: buffers are broadcast as they are. Seen: ``'Tensor' object has no
attribute 'device_mesh'`` in ``prepare``.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29592",
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
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
try:
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
except AttributeError as error:
    print(f"SEEN {error}")
else:
    print("GONE it is prepared")
torch.distributed.destroy_process_group()
