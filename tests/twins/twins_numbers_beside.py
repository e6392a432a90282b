"""Optimizers that keep numbers beside the moments, and a checkpoint that loses one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .declare import Torch, twin

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

SOUND = "twins.twins_numbers_beside:WithProduct"


class WithProduct(Torch):
    """NAdam keeps the product of all its momenta so far: one number for each parameter, however that is sharded."""

    def make_optimizer(self, model: Module) -> torch.optim.Optimizer:
        from torch.optim import NAdam

        return NAdam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=3e-3)


@twin(
    "reshard",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"mu_product 'blocks\.0\.linear\.bias' and 11 others: other values after the load at 4 ranks",
    also={"paths": r"mu_product .* other values", "portable": r"mu_product .* other values"},
    sound=SOUND,
)
class ProductIsLost(WithProduct):
    """Continues a loaded counter from 1, like a fresh one."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        for state in self.optimizer.state.values():
            state["mu_product"].fill_(1.0)
