"""DeepSpeed 0.19.8: with the loss of the Ulysses tutorial, gradients are right at ZeRO-3, and times its size at other stages.

The tutorial sums the loss over the ranks of a sequence by a differentiable collective, whose backward pass gives each rank as
many gradients as there are ranks. ZeRO-0, 1 and 2 divide by the data parallel ranks alone, ZeRO-3 by all. Adam and clipping
hide it. Expected: one norm. Seen: twice that, below ZeRO-3. https://github.com/deepspeedai/DeepSpeed/issues/5248
"""

import os

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import distributed, nn
from torch.distributed.nn.functional import all_reduce


def norm(stage: int) -> float:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1e6,
        "sequence_parallel_size": 2,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, mpu=parallel_state_sp
    )
    part = engine(torch.ones(1, 4)).sum() / 2
    engine.backward(all_reduce(part, group=parallel_state_sp.get_sequence_parallel_group()))
    engine.step()
    return float(engine.get_global_grad_norm())


def rank(number: int) -> None:
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(number),
        "LOCAL_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29623"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    parallel_state_sp.initialize_sequence_parallel(2)
    found = [norm(stage) for stage in (1, 2, 3)]
    if number == 0:
        words = ", ".join(f"{one:.2f} at ZeRO-{stage}" for stage, one in enumerate(found, 1))
        print("SEEN" if max(found) > 1.5 * min(found) else "GONE", f"norm {words}; expected 2.00")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (), 2)
