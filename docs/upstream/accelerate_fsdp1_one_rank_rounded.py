"""accelerate 1.15.0: on one rank, load_state of an FSDP1 model with SHARDED_STATE_DICT rounds float32 masters to bfloat16.

On one rank FSDP1 does not shard, and keeps the parameters in the dtype that the model was loaded in until its first forward,
beside float32 flat ones. Expected: the values of the checkpoint, as on two ranks. Seen: rounded ones.
"""

import os
import tempfile

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29589",
}
os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FullyShardedDataParallel

# accelerate takes FSDP for accelerators only; this has it on the CPU.
PartialState(cpu=True)
PartialState().distributed_type = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=1,
    auto_wrap_policy="no_wrap",
    use_orig_params=True,
    state_dict_type="SHARDED_STATE_DICT",
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)


def prepared():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(torch.bfloat16)
    model = accelerator.prepare(model)
    return model, accelerator.prepare(torch.optim.AdamW(model.parameters()))


def values(model):
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])


model, optimizer = prepared()
for _ in range(3):
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()
saved = values(model)
with tempfile.TemporaryDirectory() as place:
    accelerator.save_state(place)
    accelerator.free_memory()
    model, optimizer = prepared()
    accelerator.load_state(place)
    loaded = values(model)
off = (loaded - saved).abs().max().item()
rounded = torch.equal(loaded, saved.to(torch.bfloat16).float())
print(
    "SEEN" if off and rounded else "GONE",
    f"off by up to {off:.1e} after the load; rounded to bfloat16: {rounded}",
)
torch.distributed.destroy_process_group()
