"""Trainers under ZeRO that leave out one parameter of a flat partition, in which its neighbours move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, GRADIENTS, PARITY, twin

if TYPE_CHECKING:
    from torch.nn import Module

ONE = "inlet.weight"


@twin(
    "optimizer",
    "zero1-fp32-w2-model_mlp",
    "zero3-fp32-w2-model_mlp",
    match=r"^trainable parameter 'module\.inlet\.weight' had no gradient in three steps: its state in the optimizer is all zero$",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class OneWithoutGradient(AccelerateDriver):
    """Its gradient is cut; weight decay moves it all the same."""

    def build(self, model: Module) -> None:
        import torch

        model.get_parameter(ONE).register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        super().build(model)


@twin(
    "optimizer",
    "zero1-bf16_upcast-w2-model_mlp",
    match=r"^trainable parameter 'module\.inlet\.weight' did not move in three steps, on any rank$",
    also={**PARITY, **CLIPPING},
)
class OneWithoutRate(AccelerateDriver):
    """A group of its own whose learning rate is forgotten: the master stays, as its copy in bfloat16 may for a while."""

    def make_optimizer(self, model: Module) -> Any:
        optimizer = super().make_optimizer(model)
        (group,) = optimizer.param_groups
        forgotten = model.get_parameter(ONE)
        group["params"] = [parameter for parameter in group["params"] if parameter is not forgotten]
        optimizer.add_param_group({"params": [forgotten], "lr": 0.0})
        return optimizer
