"""torch 2.13.0: a pipeline stage that DistributedDataParallel wraps fails in its first step.

``PipelineStage`` without ``input_args`` and ``output_args`` finds out shapes by a forward and a backward pass. That backward runs
DDP's hooks, so that its reducer has seen each parameter twice before the first reduction. Expected: a step. Seen: an internal
assertion about rebuilt parameter indices.
"""

import os

os.environ |= {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29621",
}

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

distributed.init_process_group("gloo")
module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
stage = PipelineStage(module, 0, 1, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
try:
    for _ in range(2):
        schedule.step(torch.ones(2, 4), target=torch.ones(2, 4))
    print("GONE")
except RuntimeError as error:
    print("SEEN", str(error.__cause__ or error).splitlines()[0])
distributed.destroy_process_group()
