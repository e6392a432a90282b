"""What a tiny model is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TinyModel:
    """How to make the model and its data.

    ``make`` gives a float32 model on the CPU from the current random state. ``batch(step, rank)`` gives the same batch
    for the same numbers in every process. ``loss(model, batch)`` is a scalar. ``blocks`` names the classes that FSDP
    wraps one by one.
    """

    name: str
    blocks: tuple[str, ...]
    make: Callable[[], Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Module, Batch], torch.Tensor]
    preload: tuple[str, ...] = ()
    order: int = 0

    def block_modules(self, model: Module) -> list[Module]:
        """The modules of the model that FSDP wraps one by one."""
        return [module for module in model.modules() if type(module).__name__ in self.blocks]
