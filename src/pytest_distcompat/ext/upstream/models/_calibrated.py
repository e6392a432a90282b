"""A Llama with extra state: numbers in its state dict that are neither parameters nor buffers.

torch calls ``get_extra_state`` of a module for its state dict and ``set_extra_state`` when it loads
one; layers that compute in 8 bits keep their scales so. Here the activations of each MLP are
multiplied by such a number. A new model has 1, and ``calibrate`` sets another: where the extra
state is lost, the model computes something else.

https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

#: What activations are multiplied by once the model is calibrated. A power of 2 rounds nothing.
SCALE = 0.5


class ScaledActivation(nn.Module):
    """An activation function times a number that is extra state.

    Attributes:
        activation: The function.
        scale: The number.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled activation of a tensor of any shape."""
        activated: torch.Tensor = self.activation(x)
        return activated * self.scale

    def get_extra_state(self) -> torch.Tensor:
        """Return the number, as a tensor: safetensors write nothing else."""
        return torch.tensor([self.scale])

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Set the number."""
        self.scale = float(state)


class CalibratedLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]  # transformers is untyped here
    """A Llama whose MLPs have scaled activations."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = ScaledActivation(layer.mlp.act_fn)


def calibrate(model: Any) -> None:
    """Give all scaled activations of a model their number."""
    for module in model.modules():
        if isinstance(module, ScaledActivation):
            module.scale = SCALE
