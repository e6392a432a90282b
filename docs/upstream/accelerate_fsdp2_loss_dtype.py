"""accelerate 1.15.0: under FSDP2 with mixed_precision="bf16" a model that returns its loss returns it in bfloat16.

The policy has ``output_dtype`` set, which casts the outputs of the root, the loss among them. Expected: float32, as under DDP
and FSDP1, whose outputs accelerate converts. Seen: bfloat16: the loss has three digits.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29586",
}
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).float().square().mean()


# accelerate takes FSDP for accelerators only; this has it on the CPU.
PartialState(cpu=True)
PartialState().distributed_type = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
net = Net()
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
loss = model(torch.ones(2, 8))
print(
    "SEEN" if loss.dtype == torch.bfloat16 else "GONE",
    f"{type(model).__name__}: the loss is {loss.dtype}",
)
torch.distributed.destroy_process_group()
