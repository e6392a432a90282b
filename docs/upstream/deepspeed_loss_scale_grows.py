"""DeepSpeed 0.19.8: in the step in which fp16's loss scale grows, ZeRO halves the gradients.

``step`` of ZeRO-1, 2 and 3 calls ``_update_scale`` first, then ``unscale_and_clip_grads`` divides by
the new scale, which is twice the one that ``backward`` multiplied by. A comment of
https://github.com/deepspeedai/DeepSpeed/pull/8588 measured it without ZeRO. By default it is every
1000th step (``loss_scale_window``), and silent.

Expected: each step of SGD at a rate of 1 moves the weights by the same gradient, of norm 0.5. Seen:
steps by half of it.
"""

import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29605"}

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
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    moved = []
    for _ in range(4):
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            before = model.weight.detach().clone()
        row = torch.tensor([[0.6, 0.8]], dtype=torch.float16)
        engine.backward(engine(row).float().mean())
        engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            moved.append(round(float((model.weight.detach() - before).float().norm()), 2))
    if moved != [0.5] * 4:
        wrong.append(f"ZeRO-{stage}: weights moved by {moved}, expected 0.5 in each step")
print("SEEN" if wrong else "GONE", *wrong, sep="\n")
