"""DeepSpeed 0.19.8: without ZeRO, in bf16, the gradient norm under AutoTP counts the parts of the first rank alone.

``FP16_UnfusedOptimizer`` flattens all gradients into one tensor, which has lost the mark of a parallel parameter; so
``get_weight_norm`` passes over it on every other rank. Gradients are clipped by too little. Expected: the norm that ZeRO-1 has.
Seen: less.
"""

import os

import deepspeed
import torch
from torch import distributed, nn


def norm(stage: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)).bfloat16()
    specs = [{"patterns": [r"0\.weight$"]}, {"patterns": [r"1\.weight$"], "partition_type": "row"}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).float().square().sum())
    engine.step()
    return float(engine.get_global_grad_norm())


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29620"}
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
