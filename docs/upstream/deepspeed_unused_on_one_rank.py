"""DeepSpeed 0.19.8: ZeRO cannot train where one rank does not use a parameter that another uses.

Buckets have the gradients that a rank has; stage 0 has zeros for the others. Expected: the same of stages 1 to 3, or an error
that says so. Seen: sizes differ between ranks, and gloo aborts one in the first step
(https://github.com/deepspeedai/DeepSpeed/issues/1355).
"""

import os

os.environ |= {
    "WORLD_SIZE": "2",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29606",
}

import torch
from torch import multiprocessing

RANKS = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.branch = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, needed):
        x = self.layer(x)
        return self.branch(x) if needed else x


def rank(number):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing to compile on CPU
    deepspeed.init_distributed(dist_backend="gloo")
    model = Model()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )[0]
    engine.backward(engine(torch.ones(1, 8), number == 1).sum())
    engine.step()
    torch.distributed.barrier()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(number,)) for number in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(100)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
    print("SEEN" if any(codes) or None in codes else "GONE", f"exit codes {codes}")
