"""A plain torch loop with Muon for matrices and AdamW for the rest, each with its schedule; and ways to get it wrong."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--output", type=Path)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", type=Path)
parser.add_argument("--fault", default="")
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4))
# Made too early, and never asked again: nobody's optimizer.
spare = torch.optim.AdamW(plain.parameters())
model: torch.nn.Module = plain
if arguments.strategy == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (plain[0], plain[3]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
forgotten = torch.optim.SGD(model.parameters(), lr=0.1)
matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
if arguments.fault == "left out":
    rest.pop()
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]
schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in optimizers]
done = 0
if arguments.resume:
    parts, states = get_state_dict(model, optimizers)
    checkpoint: dict[str, Any] = {"model": parts, "optimizers": states, "done": 0}
    checkpoint["schedulers"] = [scheduler.state_dict() for scheduler in schedulers]
    dcp.load(checkpoint, checkpoint_id=arguments.resume)  # type: ignore[attr-defined]
    set_state_dict(model, optimizers, model_state_dict=checkpoint["model"], optim_state_dict=checkpoint["optimizers"])
    done = checkpoint["done"]
    for scheduler, state in zip(schedulers, checkpoint["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    if arguments.fault == "second forgets":
        for state in optimizers[1].state.values():
            state["exp_avg"].zero_()
while done < arguments.steps:
    numbers = torch.Generator().manual_seed(1000 * done + dist.get_rank())
    x, y = torch.randn(8, 16, generator=numbers), torch.randint(0, 4, (8,), generator=numbers)
    torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    both: list[Any] = [*optimizers, *schedulers]
    for steppable in both:
        steppable.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    done += 1
    if done == arguments.save_at:
        parts, states = get_state_dict(model, optimizers)
        checkpoint = {"model": parts, "optimizers": states, "done": done}
        checkpoint["schedulers"] = [scheduler.state_dict() for scheduler in schedulers]
        dcp.save(checkpoint, checkpoint_id=arguments.output / f"step-{done}")  # type: ignore[attr-defined]
dist.barrier()
dist.destroy_process_group()
