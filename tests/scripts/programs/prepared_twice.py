"""A model goes through ``Accelerator.prepare`` alone, before its optimizer is made, and then with it."""

import argparse

import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
arguments = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(0)
net = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
for step in range(arguments.steps):
    loss = net(torch.full((2, 4), 0.1 * step + accelerator.process_index)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print("trained to the end", flush=True)
accelerator.end_training()
