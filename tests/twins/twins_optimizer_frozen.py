"""Trainers that move what is frozen, or freeze what is to be trained."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, GRADIENTS, MEMORY, PARITY, Torch, twin

if TYPE_CHECKING:
    from torch.nn import Module


@twin(
    "optimizer",
    "fsdp2-fp32-w2-model_mlp",
    match=r"frozen parameter '(module\.)?frozen\.weight' moved",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class FrozenDrifts(Torch):
    """Weight decay done by hand, for frozen parameters too."""

    def step(self, number: int) -> float:
        import torch

        loss = super().step(number)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.999)
        return loss


@twin(
    "optimizer",
    "zero1-bf16_upcast-w2-model_mlp",
    match=r"frozen parameter 'module\.frozen\.weight' moved",
    also={
        **PARITY,
        **CLIPPING,
        **MEMORY,
        "names": r"the optimizer keeps state for 'frozen\.bias', which is no trainable",
        "start": r"^rank 0: parameter 'frozen\.bias' and 1 others: trainable after build; frozen when loaded",
    }
    | GRADIENTS,
)
class Thawed(AccelerateDriver):
    """A trainer that switches gradients on for all parameters, whoever froze them."""

    def build(self, model: Module) -> None:
        model.requires_grad_(requires_grad=True)
        super().build(model)


@twin(
    "optimizer",
    "ddp-fp32-w2-model_mlp",
    match=r"frozen parameter 'module\.frozen\.weight' moved",
    also={
        **PARITY,
        **CLIPPING,
        **MEMORY,
        "names": r"the optimizer keeps state for 'frozen\.bias', which is no trainable",
        "start": r"^rank 0: parameter 'frozen\.bias' and 1 others: trainable after build; frozen when loaded",
    }
    | GRADIENTS,
)
class ThawedTorch(Torch):
    """The twin above with plain torch."""

    def build(self, model: Module) -> None:
        model.requires_grad_(requires_grad=True)
        super().build(model)


@twin(
    "optimizer",
    "fsdp2-fp32-w2-model_mlp",
    match=r"trainable parameter 'outlet\.weight' is not in the optimizer(?s:.*)'outlet\.weight' did not move",
    also={
        **PARITY,
        **CLIPPING,
        **MEMORY,
        "names": r"the optimizer of no rank keeps state for 'outlet\.weight'",
        "start": r"^rank 0: parameter 'outlet\.bias' and 1 others: frozen after build; trainable when loaded",
        **GRADIENTS,
    },
)
class FrozenUnasked(Torch):
    """A trainer that freezes the last layer, and forgets to say so."""

    def build(self, model: Module) -> None:
        model.get_submodule("outlet").requires_grad_(requires_grad=False)
        super().build(model)


@twin(
    "optimizer",
    "fsdp2-fp32-w2-model_mlp",
    match=r"trainable parameter 'inlet\.weight' had no gradient in three steps: a block is recomputed with use_reentrant=True",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class RecomputesTheFirst(Torch):
    """Recomputes its first layer re-entrantly: its input is data, which requires no gradient."""

    def build(self, model: Module) -> None:
        from torch.utils.checkpoint import checkpoint

        super().build(model)
        inlet: Any = self.model.inlet
        inlet.forward = functools.partial(checkpoint, inlet.forward, use_reentrant=True)
