"""DeepSpeed 0.19.8: under ZeRO-3 the whole state dict of an engine lacks the extra state of modules.

``_zero3_consolidated_16bit_state_dict`` collects parameters and buffers, and never asks ``Module.get_extra_state``. So what
``save_16bit_model``, ``Accelerator.get_state_dict`` and ``Trainer.save_model`` write lacks it, without a word. Expected: the keys
of the module's own state dict. Seen: all but ``_extra_state``. With the other stages it is there.

https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html (get_extra_state)
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29675"}

import deepspeed
import torch

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
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)
missing = expected - set(engine._consolidated_16bit_state_dict())
print(
    "SEEN" if missing else "GONE",
    f"the whole state dict lacks {sorted(missing)} of {sorted(expected)}",
)
