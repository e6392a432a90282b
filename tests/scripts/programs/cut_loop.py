"""Train a two-block model in plain torch; arguments say which modules FSDP makes units."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="fsdp2")
parser.add_argument("--wrap", default="blocks")
parser.add_argument("--declares", action="store_true", help="the model says what its blocks are")
parser.add_argument("--frozen", action="store_true", help="all but the second layers of the blocks")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--recompute", action="store_true", help="each block, wrapped before FSDP comes")
arguments = parser.parse_args()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.relu(self.first(x)))
        return x + y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.outlet(x)
        return y


if arguments.declares:
    Net._no_split_modules = ["Block"]  # type: ignore[attr-defined]

dist.init_process_group("gloo")
torch.manual_seed(0)
model: nn.Module = Net()
if arguments.recompute:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, Block)]
if arguments.frozen:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("second" in name)
cuts: dict[str, list[nn.Module]] = {
    "blocks": blocks,
    "whole": [],
    "by hand": [],
    "children": [child for block in blocks for child in block.children()],
    "second": [*(block.get_submodule("second") for block in blocks), *blocks],
    "one": blocks[:1],
    "not the root": blocks,
}
units = cuts[arguments.wrap]
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
if arguments.strategy == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif arguments.strategy == "fsdp1":
    if arguments.wrap == "by hand":
        layers = model.get_submodule("blocks")
        for name, block in list(layers.named_children()):
            wrapped = FullyShardedDataParallel(block, device_id=torch.device("cpu"), use_orig_params=True)
            layers.add_module(name, wrapped)
    policy = CustomPolicy(lambda module: module in units) if units else None
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
else:
    for unit in units:
        fully_shard(unit, mesh=mesh)
    if arguments.wrap != "not the root":
        fully_shard(model, mesh=mesh)
if arguments.compile:
    model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
for step in range(3):
    numbers = torch.Generator().manual_seed(10 * step + dist.get_rank())
    loss = model(torch.randn(4, 16, generator=numbers)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
