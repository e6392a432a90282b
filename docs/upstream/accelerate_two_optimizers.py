"""accelerate 1.15.0: with FSDP2, two optimizers are prepared and cannot be saved.

``save_state`` takes the model at the place of each optimizer. Expected: a checkpoint of both, as under DDP. Seen: IndexError.
"""

import os
import tempfile

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29567",
}
os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu"}
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
accelerator = Accelerator(fsdp_plugin=plugin)
model = torch.nn.Linear(4, 4)
two = [torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in model.parameters()]
model, *two = accelerator.prepare(model, *two)
accelerator.backward(model(torch.ones(2, 4)).sum())
for one in two:
    one.step()
try:
    accelerator.save_state(tempfile.mkdtemp())
    print("GONE both were saved")
except IndexError as error:
    print("SEEN IndexError:", error)
torch.distributed.destroy_process_group()
