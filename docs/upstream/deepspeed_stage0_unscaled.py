"""DeepSpeed 0.19.8: without ZeRO fp16 divides gradients by a loss scale that the loss never had.

``engine.backward`` multiplies the loss by the scale for ``ZeROOptimizer`` alone, and at stage 0
fp16 has ``FP16_UnfusedOptimizer`` or ``FP16_Optimizer``, whose ``step`` divides by it. Adam hides
the small gradients, but they are never clipped, and the reported norm is too small by the scale.
https://github.com/deepspeedai/DeepSpeed/pull/8393 (open); bfloat16 had the same until
https://github.com/deepspeedai/DeepSpeed/pull/7839. A ``PipelineEngine`` has it too.

Expected: a step of SGD at a rate of 1 moves the weights by the gradient, of norm 0.5. Seen: by
0.5 / 16 with a scale of 16.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29607"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

model = torch.nn.Linear(2, 4, bias=False)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "fp16": {"enabled": True, "initial_scale_power": 4},
}
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
before = model.weight.detach().clone()
engine.backward(engine(torch.tensor([[0.6, 0.8]], dtype=torch.float16)).float().mean())
engine.step()
moved = float((model.weight.detach() - before).float().norm())
right = abs(moved - 0.5) < 0.01
print("GONE" if right else "SEEN", f"weights moved by {moved:.3f}, expected 0.500")
