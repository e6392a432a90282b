"""Module class of the model ``mlp``, in a module of its own because defining it imports torch."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Residual block; FSDP wraps each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape, in the dtype of the parameters."""
        y: torch.Tensor = self.linear(torch.relu(self.norm(x)))
        return x + y


class MLP(nn.Module):
    """Classifier with uneven sizes, buffers and a frozen layer: (batch, features) -> (batch, classes).

    Buffers are cast where they are used, because neither FSDP2 nor DeepSpeed casts them: a bfloat16 activation times a
    float32 buffer is float32, which the next layer's bfloat16 weights do not accept.
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
        """Return logits in the dtype of the last product."""
        x = self.inlet(x.to(self.inlet.weight.dtype))
        x = x + self.frozen(x) * self.scale.to(x.dtype) + self.offset.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.outlet(x)
        return logits
