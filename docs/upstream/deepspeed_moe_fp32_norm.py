"""DeepSpeed 0.19.8: without ZeRO, in fp32, the gradient norm with experts on several ranks is a mean, and too little is clipped.

``clip_grad_norm_`` averages the norms of all ranks, as if these had the same experts
(https://github.com/deepspeedai/DeepSpeed/issues/8475, found with AutoEP). Expected: what is clipped to 1 has norm 1. Seen: more.
"""

import os

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from torch import distributed, nn


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(number)
    model = MoE(
        4,
        nn.Linear(4, 4),
        num_experts=2,
        ep_size=2,
        min_capacity=0,
        drop_tokens=False,
        use_rts=False,
    )
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [*model.parameters()], "name": "all"}
    )
    optimizer, config = (
        torch.optim.SGD(groups, lr=1.0),
        {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0},
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine.backward(9 * engine(torch.randn(8, 4))[0].square().sum())
    engine.step()
    # By SGD at a learning rate of 1 the weights move by their gradients; both ranks have the gate.
    square = torch.zeros(())
    for parameter, old in zip(model.parameters(), before, strict=True):
        square += (parameter.detach() - old).square().sum() / (1 if is_moe_param(parameter) else 2)
    distributed.all_reduce(square)
    if number == 0:
        print(
            "SEEN" if square > 1.01 else "GONE",
            f"the norm of clipped gradients is {float(square) ** 0.5:.3f}",
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
