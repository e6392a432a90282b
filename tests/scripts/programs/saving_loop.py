"""A DDP loop that saves in some way, or not at all."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save, save_file
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--saves", default="nothing")
parser.add_argument("--output", type=Path)
parser.add_argument("--lbfgs", action="store_true")
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--adapter", action="store_true")
parser.add_argument("--unused", action="store_true")
parser.add_argument("--shards", action="store_true")
parser.add_argument("--tied", action="store_true")
arguments = parser.parse_args()


class Layer(torch.nn.Linear):
    gradient_checkpointing = arguments.recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compute = super().forward
        if not arguments.recompute:
            return compute(x)
        recomputed: torch.Tensor = checkpoint(compute, x, use_reentrant=False)
        return recomputed


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(4, 4), Layer(4, 1)])
        if arguments.unused:
            self.pooler = Layer(4, 4)
        if arguments.tied:
            self.layers.insert(1, Layer(4, 4))
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if arguments.unused:
            self.pooler(torch.ones(4))  # computed, and no part of the loss
        return x


dist.init_process_group("gloo")
torch.manual_seed(0)
net: Any = Net()
if arguments.adapter:
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(net, LoraConfig(target_modules=["layers.0"], modules_to_save=["layers.1"]))
if arguments.shards:
    from torch.distributed.fsdp import fully_shard

    for block in (*net.layers, *([net.pooler] if arguments.unused else [])):
        fully_shard(block)
    model = fully_shard(net)
else:
    model = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=arguments.unused)
optimizer: Any = (
    torch.optim.LBFGS(model.parameters(), max_iter=2)
    if arguments.lbfgs
    else torch.optim.AdamW(model.parameters(), lr=1e-2)
)
batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    return loss


for _ in range(4):
    if arguments.lbfgs:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
state = {
    name: value.full_tensor() if arguments.shards else value.contiguous()
    for name, value in (model if arguments.shards else model.module).state_dict().items()
}
if arguments.output and dist.get_rank() == 0:
    if arguments.saves == "metrics":
        torch.save({"loss": 1.0}, arguments.output / "metrics.pt")
    if arguments.saves == "safetensors":
        torch.save(optimizer.state_dict(), arguments.output / "optimizer.pt")
        save_file(state, arguments.output / "model.safetensors")
    if arguments.saves == "bytes":
        torch.save(optimizer.state_dict(), arguments.output / "optimizer.pt")
        (arguments.output / "model.safetensors").write_bytes(save(state))
    if arguments.saves == "both names":
        torch.save(state, arguments.output / "model.pt")
    if arguments.saves == "both names apart":
        torch.save({**state, "layers.1.weight": state["layers.1.weight"] + 1}, arguments.output / "model.pt")
    if arguments.saves == "parts":
        for part in range(2):
            own = {name: value for name, value in state.items() if name.startswith(f"layers.{part}.")}
            torch.save(own, arguments.output / f"layer-{part}.pt")
    if arguments.saves == "one part":
        torch.save({name: state[name] for name in list(state)[:2]}, arguments.output / "layer.pt")
    if arguments.saves == "adapter":
        net.save_pretrained(arguments.output)
    if arguments.saves == "adapter of the start":
        path = arguments.output / "adapter_model.safetensors"
        net.save_pretrained(arguments.output)
        save_file({name: torch.zeros_like(value) for name, value in load_file(path).items()}, path)
    if arguments.saves == "modules":  # as sentence-transformers does
        modules = [{"idx": n, "name": f"layers.{n}", "path": ("", "1_Dense")[n]} for n in range(2)]
        for module in modules:
            place = arguments.output / str(module["path"])
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text("{}")
            own = {name.removeprefix(f"{module['name']}."): value for name, value in state.items()}
            save_file({name: value for name, value in own.items() if "." not in name}, place / "model.safetensors")
        (arguments.output / "modules.json").write_text(json.dumps(modules))
    if arguments.saves == "renamed":
        save_file({f"net.{name}": value for name, value in state.items()}, arguments.output / "model.safetensors")
    if arguments.saves == "renamed at once":
        torch.save(state, arguments.output / "model.tmp")
        (arguments.output / "model.tmp").replace(arguments.output / "model.pt")
dist.destroy_process_group()
