"""DeepSpeed 0.19.8: with ``round_robin_gradients`` ``safe_get_full_fp32_param`` returns elements of other parameters.

The setting reorders the flat groups of ZeRO-1 and ZeRO-2, and parameters are linked to their masters in the order without it
(``_link_all_hp_params`` passes ``bit16_groups``). ``safe_get_full_grad`` and ``safe_get_full_optimizer_state`` read by the same
link, and ``safe_set_full_*`` and universal checkpoints write by it. Training is right.
Expected: each parameter's own values. Seen: [0, 2, 1, 3] instead of [0, 1, 2, 3].
"""

import os

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param


def train(rank: int, port: int) -> None:
    """Run a rank: parameter n consists of the number n."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.full((4,), float(n))) for n in range(4))
    zero = {"stage": 2, "round_robin_gradients": True}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )
    found = [safe_get_full_fp32_param(parameter)[0].item() for parameter in model]
    if rank == 0:
        print(
            "SEEN" if found != [0.0, 1.0, 2.0, 3.0] else "GONE",
            f"{found}; expected [0.0, 1.0, 2.0, 3.0]",
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, args=(29611,), nprocs=2)
