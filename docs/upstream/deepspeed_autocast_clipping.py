"""DeepSpeed 0.19.8: with ``torch_autocast`` in float16 ZeRO clips gradients that are still scaled.

The optimizer of ZeRO-1, 2 and 3 makes a ``torch_autocast_gradscaler``, whose factor
of 65536 is not in ``loss_scale``: ``unscale_and_clip_grads`` clips the scaled gradients, then
``GradScaler.step`` divides what is left by the factor. ``get_global_grad_norm`` returns the norm of
the scaled gradients. Adam hides most of it, until gradients come near its ``eps``.

Expected: a norm of 0.5, and a step of SGD at a rate of 1 that moves weights by the clipped norm,
0.1. Seen: a norm of 32768, and a step of 1.5e-6.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29604"}

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
deepspeed.init_distributed(dist_backend="gloo")

wrong = []
for stage in (1, 2, 3):
    model = torch.nn.Linear(2, 4, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.1,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        before = model.weight.detach().clone()
    engine.backward(engine(torch.tensor([[0.6, 0.8]])).float().mean())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        moved = float((model.weight.detach() - before).norm())
    norm = float(engine.get_global_grad_norm())
    if abs(norm - 0.5) > 0.01 or abs(moved - 0.1) > 0.01:
        wrong.append(f"ZeRO-{stage}: the norm is {norm:.0f}, and weights moved by {moved:.1e}")
print("SEEN" if wrong else "GONE", *wrong, sep="\n")
