"""Placeholder of a layer that this rank does not have.

Under pipeline parallelism each rank keeps some layers of a model; ``pipeline_parallel.py`` puts an
``Elsewhere`` in the place of each other one. A module of its own, since it imports torch.
"""

from __future__ import annotations

import torch
from torch import nn


class Elsewhere(nn.Module):
    """Placeholder of a module that another stage of the pipeline has."""

    def forward(self, received: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return the input, so that the model's own forward runs through all layers."""
        return received
