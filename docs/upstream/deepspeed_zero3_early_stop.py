"""DeepSpeed 0.19.8: ZeRO-3 cannot train a block that is recomputed to its end (``checkpoint(..., early_stop=False)``).

By default a recomputation stops once it has all that the backward pass needs, before the hook after the block's last module. With
``early_stop=False`` that hook runs: it releases the parameters of the module whose backward pass has begun, and their gradients
do not fit what is left. Expected: it trains, as with the default, or is refused. Seen: a RuntimeError in ``backward``.
Near it, for frozen parameters: https://github.com/deepspeedai/DeepSpeed/pull/8148.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29615"}

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    """Two layers beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 13), torch.nn.Linear(13, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layers make of it."""
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    """A block that is recomputed, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = torch.nn.Linear(8, 8), Block(), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        return self.last(
            checkpoint(self.block, self.first(x), use_reentrant=False, early_stop=False)
        )


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
model = Model()
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
engine = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
)[0]
try:
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
except RuntimeError as error:
    print(f"SEEN RuntimeError: {error}")
else:
    print("GONE it trains")
