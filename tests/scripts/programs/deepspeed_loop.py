"""DeepSpeed by its own API, as its getting-started page writes it."""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
from tiny import Rows, model  # type: ignore[import-not-found]  # it lies beside the script

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--output", type=Path)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--unused", action="store_true")
arguments = parser.parse_args()

deepspeed.init_distributed(dist_backend="gloo" if not torch.cuda.is_available() else "nccl")
net = model()
if arguments.unused:
    net.pooler = torch.nn.Linear(4, 4)  # no part of the loss
engine, _, _, _ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": arguments.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": arguments.bf16},
    },
)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rows = Rows()
for step in range(arguments.steps):
    places = [(step * ranks + rank) * 2 + micro_batch for micro_batch in range(2)]
    batch = torch.stack([rows[place]["input_ids"] for place in places]).to(engine.device)
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    print(f"step {step + 1} loss {float(loss).hex()}", flush=True)
    if step + 1 == arguments.save_at:
        engine.save_checkpoint(str(arguments.output / f"step-{step + 1}"))
