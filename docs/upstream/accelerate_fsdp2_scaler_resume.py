"""accelerate 1.15.0: ``load_fsdp_optimizer`` steps the gradient scaler of fp16 under FSDP2 (https://github.com/huggingface/accelerate/issues/4289).

It hands its wrapper of the optimizer to torch's ``get_optimizer_state_dict``, which takes a step with zero gradients to make the
state. Through the wrapper that step is the scaler's. Expected: the optimizer's state, and the scaler as it was. Seen where the
scaler has not scaled yet, as in Trainer, which loads it after the optimizer: ``Attempted step but _scale is None``. Seen in
``load_state``, which loads it before: it has counted one step more than was saved. accelerate makes no scaler on the CPU: this
script gives it one.
"""

import os
import tempfile

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29631",
}
os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu"}
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import load_fsdp_optimizer

PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def prepared():
    """An accelerator with a scaler, and what it made of a layer and its optimizer."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = torch.nn.Linear(4, 4)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


with tempfile.TemporaryDirectory() as place:
    accelerator, model, optimizer = prepared()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.save_state(place)
    saved = accelerator.scaler.state_dict()["_growth_tracker"]

    accelerator, model, optimizer = prepared()
    try:
        load_fsdp_optimizer(accelerator.state.fsdp_plugin, accelerator, optimizer, model, place)
        print("GONE the optimizer is loaded before the scaler")
    except AssertionError as error:
        print("SEEN AssertionError:", str(error)[:40])

    accelerator, model, optimizer = prepared()
    accelerator.load_state(place)
    loaded = accelerator.scaler.state_dict()["_growth_tracker"]
    print(
        "SEEN" if loaded != saved else "GONE",
        f"the scaler has counted {loaded} steps after load_state; {saved} were saved",
    )
torch.distributed.destroy_process_group()
