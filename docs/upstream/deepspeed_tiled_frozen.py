"""DeepSpeed 0.19.8: behind a frozen part ``TiledMLP`` trains nothing, without a word.

Its inputs need no gradient there. Its ``autograd.Function`` gets the parameters in a list, which
autograd does not look into, so that its output needs none either. torch's re-entrant checkpointing
has the same limit, and warns. Without tiling the block behind a frozen layer, or behind frozen
embeddings, is trained.

Expected: gradients, or a refusal. Seen: the parameters have none; where nothing else is trained
``backward`` fails.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")


class Model(torch.nn.Module):
    """A frozen layer, one that is tiled, and the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.tiled, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the three."""
        parameters = list(self.tiled.parameters())
        x = TiledMLP.apply(
            lambda module, part: module(part), self.tiled, self.frozen(x), 2, parameters
        )
        return self.last(x)


model = Model()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(trained, lr=1.0), config=config
)
before = model.tiled.weight.detach().clone()
engine.backward(engine(torch.ones(1, 4, 4)).sum())
engine.step()
moved = not torch.equal(before, model.tiled.weight)
print("GONE the tiled layer is trained" if moved else "SEEN the tiled layer did not move")
