"""torch 2.13.0: zero-bubble schedules give wrong gradients if FSDP2 shards modules of a stage one by one.

Parameters of layers that ``fully_shard`` wraps before the stage get other gradients than in one process, or none; those of the
stage itself are right, and so is Interleaved1F1B. With DDP it is known: https://github.com/pytorch/pytorch/issues/144530.
Expected: the gradients of one process under both schedules. Seen: under Interleaved1F1B alone.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29634",
}

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

STAGES = 4


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(STAGES))
    )


def wrong(schedule: type) -> list[str]:
    torch.manual_seed(1)
    rows, targets = torch.randn(8, 4), torch.randn(8, 4)
    alone, model = whole(), whole()
    nn.functional.mse_loss(alone(rows), targets).backward()
    stages = []
    for number, part in enumerate(model):
        fully_shard(part[0])
        stages.append(PipelineStage(fully_shard(part), number, STAGES, torch.device("cpu")))
    schedule(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss).step(rows, target=targets)
    found = []
    for (name, one), right in zip(model.named_parameters(), alone.parameters(), strict=True):
        if one.grad is None or not torch.allclose(one.grad.full_tensor(), right.grad, atol=1e-6):
            found.append(f"{name} {'None' if one.grad is None else 'other'}")
    return found


distributed.init_process_group("gloo")
for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
    found = wrong(schedule)
    print("SEEN" if found else "GONE", schedule.__name__, *found)
distributed.destroy_process_group()
