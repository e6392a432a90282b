"""Placeholder of a layer that this rank does not have."""

from __future__ import annotations

import torch
from torch import nn


class Elsewhere(nn.Module):
    """Placeholder of a module that another stage of the pipeline has."""

    def forward(self, received: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return the input."""
        return received
