"""A loop that splits one global batch over its ranks; and ways to train otherwise on several."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--fault", default="")
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if arguments.fault == "seed" else 0)
plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
model: torch.nn.Module = plain
if arguments.strategy == "fsdp2":
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
else:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(arguments.steps):
    data = torch.Generator().manual_seed(step)
    rows, targets = torch.randn(8, 16, generator=data), torch.randn(8, 4, generator=data)
    size = arguments.batch // arguments.accumulate
    for micro in range(arguments.accumulate):
        first = (rank * arguments.accumulate + micro) * size
        if arguments.fault == "data":
            first = micro * size
        loss = torch.nn.functional.mse_loss(model(rows[first : first + size]), targets[first : first + size])
        if arguments.fault == "sum" and ranks > 1:
            loss = loss * ranks
        (loss / arguments.accumulate).backward()
    optimizer.step()
    optimizer.zero_grad()
    if arguments.fault == "drift" and ranks > 1 and step == arguments.steps - 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
dist.destroy_process_group()
