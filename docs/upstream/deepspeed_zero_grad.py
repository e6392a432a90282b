"""DeepSpeed 0.19.8: ``zero_grad`` does not discard what ZeRO-1, 2 and 3 have added up since the last boundary.

A user who finds a micro-batch bad, and calls ``engine.zero_grad()``, or ``engine.optimizer.zero_grad()``, keeps its gradient:
both clear ``parameter.grad`` alone, while ZeRO-2 adds up in ``averaged_gradients`` and ZeRO-3 in partitions of its own (of which
the optimizer's ``zero_grad``, not the engine's, begins anew). Expected: the norm of the second batch's gradient alone.
Seen: the norm of both batches' sum.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29602"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

wrong = []
for stage in (1, 2, 3):
    for owner in ("engine", "optimizer"):
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        zero = {"stage": stage}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "gradient_clipping": 1e6,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(torch.tensor([[100.0, 100.0]])).sum())
        engine.step()
        (engine if owner == "engine" else engine.optimizer).zero_grad()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.tensor([[3.0, 4.0]])).sum())
        engine.step()
        norm = float(engine.get_global_grad_norm())
        if abs(norm - 5.0) > 1e-3:
            wrong.append(f"ZeRO-{stage}, {owner}.zero_grad(): the norm is {norm:.1f}; expected 5.0")
print("SEEN" if wrong else "GONE", *wrong, sep="\n")
