"""The module behind ``plain``; apart, because a class needs torch when it is defined."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual unit; FSDP wraps each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width) in and out, in the dtype of the parameters."""
        y: torch.Tensor = self.linear(torch.relu(self.norm(x)))
        return x + y


class MLP(nn.Module):
    """(batch, features) -> (batch, classes). Buffers are cast where they are used, as a careful author does: neither
    FSDP2 nor DeepSpeed casts them (a bfloat16 activation times a float32 buffer would turn the next product away).
    """

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(features, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.outlet = nn.Linear(width, classes)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.register_buffer("offset", torch.zeros(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits in the dtype of the last product."""
        x = self.inlet(x.to(self.inlet.weight.dtype))
        x = x + self.frozen(x) * self.scale.to(x.dtype) + self.offset.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.outlet(x)
        return logits
