"""DeepSpeed 0.19.8: without ZeRO, in bf16, the gradient norm is that of all but the experts, and too little is clipped.

``FP16_UnfusedOptimizer`` splits the experts' gradients off and drops them (https://github.com/deepspeedai/DeepSpeed/pull/8613).
Expected: the norm that ZeRO-1 has. Seen: less.
"""

import os

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import distributed, nn


def norm(stage: int) -> float:
    torch.manual_seed(0)
    model = MoE(
        4, nn.Linear(4, 4), num_experts=2, min_capacity=0, drop_tokens=False, use_rts=False
    ).bfloat16()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [*model.parameters()], "name": "all"}
    )
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(groups, lr=0.1), config=config
    )
    engine.backward(engine(torch.randn(8, 4, dtype=torch.bfloat16))[0].float().square().sum())
    engine.step()
    return float(engine.get_global_grad_norm())


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29632"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    found = [norm(stage) for stage in (0, 1)]
    if number == 0:
        print(
            "SEEN" if found[0] < 0.95 * found[1] else "GONE",
            f"norm {found[0]:.3f} at stage 0, {found[1]:.3f} at 1",
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
