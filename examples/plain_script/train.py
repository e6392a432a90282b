"""A training script in one file: DDP, accumulation, and a checkpoint that rank 0 writes by torch.save."""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out-dir", type=Path, required=True)
parser.add_argument("--max-iters", type=int, default=5)
parser.add_argument("--save-every", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--resume", action="store_true")
arguments = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
torch.manual_seed(0)
plain = torch.nn.Sequential(
    torch.nn.Embedding(32, 16), torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 32)
)
model = DistributedDataParallel(plain.to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done = 0
file = arguments.out_dir / "ckpt.pt"
if arguments.resume:
    checkpoint = torch.load(file, map_location=device)
    plain.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    done = checkpoint["done"]

while done < arguments.max_iters:
    # The step and the rank choose the rows, so that a resumed run goes on with the next ones.
    numbers = torch.Generator().manual_seed(1000 * done + rank)
    for micro in range(arguments.accumulate):
        tokens = torch.randint(0, 32, (4, 9), generator=numbers).to(device)
        last = micro == arguments.accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / arguments.accumulate).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    if rank == 0 and (done % arguments.save_every == 0 or done == arguments.max_iters):
        state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
        torch.save(state, file)
dist.destroy_process_group()
