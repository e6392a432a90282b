"""A plain torch loop: DDP, FSDP1, FSDP2, or nothing though it is started on several ranks; and ways to get it wrong."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--output", type=Path)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", type=Path)
parser.add_argument("--saved-by", type=int, default=0)
parser.add_argument("--fault", default="")
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
model: torch.nn.Module = plain
if arguments.fault == "stale":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if arguments.strategy == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif arguments.strategy == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
elif arguments.strategy == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for part in (plain[0], plain[3]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
if arguments.fault != "stale":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
torch.manual_seed(rank)
done = 0
if arguments.resume:
    parts, states = get_state_dict(model, optimizer)
    checkpoint: dict[str, Any] = {"model": parts, "optimizer": states, "scheduler": scheduler.state_dict(), "done": 0}
    saved_by = arguments.saved_by or ranks
    checkpoint["random"] = {str(rank): torch.get_rng_state() for rank in range(saved_by)}
    dcp.load(checkpoint, checkpoint_id=arguments.resume)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=checkpoint["model"], optim_state_dict=checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    torch.set_rng_state(checkpoint["random"][str(rank % saved_by)])
    done = 0 if arguments.fault == "from step 0" else checkpoint["done"]
    if arguments.fault == "moments are zero":
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
while done < arguments.steps:
    numbers = torch.Generator().manual_seed(1000 * done + rank)
    x, y = torch.randn(8, 16, generator=numbers), torch.randint(0, 4, (8,), generator=numbers)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    done += 1
    print(f"step {done} loss {float(loss).hex()}", flush=True)
    if done == arguments.save_at:
        parts, states = get_state_dict(model, optimizer)
        everyones: list[torch.Tensor] = [torch.empty_like(torch.get_rng_state()) for _ in range(ranks)]
        dist.all_gather(everyones, torch.get_rng_state())
        checkpoint = {"model": parts, "optimizer": states, "scheduler": scheduler.state_dict(), "done": done}
        checkpoint["random"] = {str(rank): state for rank, state in enumerate(everyones)}
        dcp.save(checkpoint, checkpoint_id=arguments.output / f"step-{done}")  # type: ignore[attr-defined]
if arguments.output:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0 and arguments.fault != "no weights":
        torch.save(state, arguments.output / "model.pt")
dist.barrier()
dist.destroy_process_group()
