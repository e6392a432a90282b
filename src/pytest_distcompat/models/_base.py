"""What a tiny model is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TinyModel:
    """How to make the model and its data.

    ``make`` gives a float32 model on the CPU from the current random state. ``batch(step, rank)`` gives the same batch
    for the same numbers in every process. ``loss(model, batch)`` is the mean over what ``count(batch)`` counts: tokens, or
    samples. ``outputs`` is what the model computes, and ``reload`` reads what was exported.

    ``in_8_bits`` says whether it has layers whose sizes 16 divides, as products in 8 bits need.

    ``blocks`` names the classes that FSDP wraps one by one, ``unit_size`` how many parameters option ``wrap_policy`` makes a
    unit of, ``part`` the modules that option ``frozen`` freezes, ``ignored_module`` the one, of frozen weights, that option
    ``ignored_modules`` leaves out of the sharding, ``adapted`` the modules that LoRA adapts. ``spread`` is how much further its
    loss may be off a reference than a precision below float32 allows: the fewer are averaged, the more rounding shows.
    """

    name: str
    blocks: tuple[str, ...]
    make: Callable[[], Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Module, Batch], torch.Tensor]
    count: Callable[[Batch], int]
    outputs: Callable[[Module, Batch], torch.Tensor]
    reload: Callable[[Path], Module]
    part: tuple[str, ...] = ()
    ignored_module: str = ""
    unit_size: int = 1000
    adapted: tuple[str, ...] = ()
    in_8_bits: bool = True
    spread: float = 1.0
    preload: tuple[str, ...] = ()
    order: int = 0

    def block_modules(self, model: Module) -> list[Module]:
        """The modules of the model that FSDP wraps one by one."""
        return [module for module in model.modules() if type(module).__name__ in self.blocks]
