"""DeepSpeed 0.19.8: ZeRO-3 takes a leaf module whose inputs need no gradient, and its parameters are not there in the backward.

``stage3_module_granularity_threshold`` and ``set_z3_leaf_modules`` make a module one unit that is gathered at once, by a hook on
its inputs. A model as a whole has inputs that need no gradient. https://github.com/deepspeedai/DeepSpeed/pull/5008 refused that
with a message, which is gone. Expected: it trains, or is refused. Seen: a RuntimeError about shapes in ``backward``.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29612"}

import deepspeed
import torch


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both."""
        return self.second(self.first(x))


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
model = Model()
zero = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_module_granularity_threshold": 1000,
}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[0]
try:
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
except RuntimeError as error:
    print(f"SEEN RuntimeError: {error}")
else:
    print("GONE it trains")
