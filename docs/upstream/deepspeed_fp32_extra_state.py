"""DeepSpeed 0.19.8: the float32 weights that are put together from a ZeRO checkpoint lack the extra state of modules.

``zero_to_fp32`` takes parameters from the optimizer's files, and buffers by their names. Extra state is among the module's
states in the checkpoint, and is left out without a word. Expected: the keys of the module's own state dict. Seen with stages 1
to 3: all but ``_extra_state``.

https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html (get_extra_state)
"""

import os
import tempfile

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29676"}

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")


class Scaled(torch.nn.Linear):
    """A layer with a number in its state dict that is neither a parameter nor a buffer."""

    scale = 2.0

    def get_extra_state(self):
        return torch.tensor([self.scale])

    def set_extra_state(self, state):
        self.scale = float(state)


model = Scaled(8, 8)
expected = set(model.state_dict())
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)
with tempfile.TemporaryDirectory() as place:
    engine.backward(engine(torch.randn(4, 8)).square().sum())
    engine.step()
    engine.save_checkpoint(place)
    missing = expected - set(get_fp32_state_dict_from_zero_checkpoint(place))
print("SEEN" if missing else "GONE", f"the weights lack {sorted(missing)} of {sorted(expected)}")
