"""DeepSpeed 0.19.8: ZeRO-3 loses a use of a block that is recomputed re-entrantly, where a parameter exceeds the bucket.

A block is applied twice in a step, each time by ``checkpoint(block, x, use_reentrant=True)``. Each use has a backward
pass of its own, which gives the parameter's gradient to the optimizer. A parameter that exceeds
``reduce_bucket_size`` is reduced at once, and the second gradient of a step replaces the first in the partition:
``partition_grads`` of ``stage3.py`` adds from the second micro-batch on. Expected: with SGD at rate 1 each parameter
moves by its gradient, or the step is refused, as by ZeRO-2 in https://github.com/deepspeedai/DeepSpeed/issues/988.
Seen: the block moves by the gradient of one use. The default size is 500 million elements; ``"auto"`` of accelerate
and transformers is the square of the hidden size, which embeddings exceed. Near it:
https://github.com/deepspeedai/DeepSpeed/pull/7780.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29614"}

import copy

import deepspeed
import torch
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    """A block between two layers, which is applied to two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Apply the block twice."""
        x, y = self.first(x), self.first(y)
        if self.training:
            one, two = (checkpoint(self.block, each, use_reentrant=True) for each in (x, y))
        else:
            one, two = self.block(x), self.block(y)
        return self.last(one + 0.5 * two)


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = Model()
alone = copy.deepcopy(model).eval()
inputs = torch.randn(4, 8), torch.randn(4, 8)
zero = {"stage": 3, "reduce_bucket_size": 10}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": zero,
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine = deepspeed.initialize(
    model=model, optimizer=optimizer, config={**config, "zero_force_ds_cpu_optimizer": False}
)[0]
engine.backward(engine(*inputs).square().mean())
engine.step()
alone(*inputs).square().mean().backward()
ratios = {}
with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    for (name, trained), before in zip(
        engine.module.named_parameters(), alone.parameters(), strict=True
    ):
        ratios[name] = float((before.detach() - trained.detach()).norm() / before.grad.norm())
wrong = {name: round(ratio, 3) for name, ratio in ratios.items() if abs(ratio - 1) > 1e-3}
if wrong:
    print(f"SEEN moved by other than the gradient, expected a ratio of 1: {wrong}")
else:
    print("GONE each parameter moves by its gradient")
