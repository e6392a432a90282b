"""How far rounding alone leads small models off in 20 steps: what ``parity`` allows a model that is not one of ours.

``python benchmarks/rounding.py [--seeds 6]`` trains four small models with three optimizers, in one process, by float32 and
by three ways to have products in bfloat16: torch's autocast, a copy of the whole model (as FSDP's policy and DeepSpeed have
it), and, which is a defect, bfloat16 masters. It prints, in Markdown, the most that a loss is off in any step (least and
most of all seeds); and how much more it is for the copy than for autocast, which is what is measured beside a user's model.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from machine import measured_on  # type: ignore[import-not-found] # a script imports from its own directory
from torch import nn
from torch.nn import functional

STEPS, ROWS = 20, 16


class Language(nn.Module):
    """One layer of attention between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.outlet = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> Any:
        """Logits: rows x tokens x vocabulary."""
        return self.outlet(self.layer(self.inlet(tokens)))


def regression() -> nn.Module:
    """Two small layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def classes() -> nn.Module:
    """Three layers and a norm."""
    layers = (
        nn.Linear(16, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    """Two of them."""
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    return nn.Sequential(*layers)


def batch(model: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and what is to be learned of them."""
    generator = torch.Generator().manual_seed(seed)
    if model == "regression":
        x = torch.randn(ROWS, 4, generator=generator)
        return x, x[:, :2]
    if model == "language":
        x = torch.randint(64, (ROWS, 8), generator=generator)
        return x, x
    shape = (ROWS, 16) if model == "classes" else (ROWS, 3, 8, 8)
    return torch.randn(shape, generator=generator), torch.randint(10, (ROWS,), generator=generator)


def loss_of(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """In float32, as everybody has it."""
    output = output.float()
    if wanted.is_floating_point():
        return functional.mse_loss(output, wanted)
    return functional.cross_entropy(output.reshape(-1, output.shape[-1]), wanted.reshape(-1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "regression": regression,
    "classes": classes,
    "convolutions": convolutions,
    "language": Language,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, 3e-3": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    "AdamW, 1e-3": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "SGD, 0.1": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
WAYS = ("autocast", "copy", "masters")


def train(model: str, optimizer: str, way: str, seed: int) -> list[float]:
    """The losses of 20 steps; ``way`` is one of WAYS, or nothing for float32."""
    torch.manual_seed(seed)
    net = MODELS[model]()
    net = net.bfloat16() if way == "masters" else net
    computing = copy.deepcopy(net).bfloat16() if way == "copy" else net
    stepping = OPTIMIZERS[optimizer](net.parameters())
    losses = []
    for step in range(STEPS):
        x, wanted = batch(model, 1000 * seed + step)
        if way in {"copy", "masters"} and x.is_floating_point():
            x = x.bfloat16()
        if way == "copy":
            computing.load_state_dict(net.state_dict())
            computing.zero_grad()
        stepping.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = loss_of(computing(x), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        if way == "copy":
            for own, other in zip(net.parameters(), computing.parameters(), strict=True):
                own.grad = None if other.grad is None else other.grad.float()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        stepping.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| model | optimizer | autocast | copy in bfloat16 | copy / autocast, at most | bfloat16 masters |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            off: dict[str, list[float]] = {way: [] for way in WAYS}
            for seed in range(arguments.seeds):
                exact = train(model, optimizer, "", seed)
                for way, found in off.items():
                    losses = train(model, optimizer, way, seed)
                    found.append(max(abs(a - b) / b for a, b in zip(losses, exact, strict=True)))
            ratio = max(a / b for a, b in zip(off["copy"], off["autocast"], strict=True))
            spread = {way: f"{min(found):.1e} to {max(found):.1e}" for way, found in off.items()}
            print(
                f"| {model} | {optimizer} | {spread['autocast']} | {spread['copy']} | {ratio:.1f} | {spread['masters']} |",
                flush=True,
            )
    print(measured_on("torch"))


if __name__ == "__main__":
    main()
