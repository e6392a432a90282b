"""DeepSpeed 0.19.8: a pipeline without ZeRO clips by the norm of its first stage alone.

``clip_grad_norm_`` counts a parameter on ranks other than the first of the model parallel group
only if it has the attribute ``model_parallel``, which ``PipelineModule`` gives to none. So the norm
of later stages is missing in float32 at stage 0. ZeRO-1 has a norm of its own, which is right.

Expected: gradients with a norm of about 5.1, most of it on the second stage, are clipped to 1.
Seen: they are not clipped, or too little.
"""

import os
from datetime import timedelta

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.pipe import PipelineModule


def run(rank: int, results) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29608", "OMP_NUM_THREADS": "1"}  # fmt: skip
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)]
    with torch.no_grad():
        layers[0].weight.copy_(torch.eye(2))
        layers[1].weight.copy_(0.1 * torch.eye(2))
    module = PipelineModule(
        layers=layers, num_stages=2, loss_fn=lambda out, target: (out * target).sum()
    )
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    engine.train_batch(iter([(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.2]]))]))
    squares = torch.zeros(())
    for old, parameter in zip(before, module.parameters(), strict=True):
        squares += (parameter.detach() - old).square().sum()
    torch.distributed.all_reduce(squares)
    if rank == 0:
        results.put(float(squares.sqrt()))


if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (results,), nprocs=2)
    moved = results.get()
    right = abs(moved - 1) < 0.01
    print(
        "GONE" if right else "SEEN",
        f"a step at a rate of 1 moved all weights by {moved:.2f}, expected 1.00",
    )
