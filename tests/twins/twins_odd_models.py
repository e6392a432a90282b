"""Trainers that are right of ordinary models, and take the storage or the names of others for what they are not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver

from .declare import CLIPPING, GRADIENTS, Torch, twin
from .twins_checkpoints import write
from .twins_checkpoints_export import Exports

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision
    from pytest_distcompat.strategies import WrapSpec


@twin("export", "ddp-fp32-w2-model_twice", match=r"Missing key\(s\) in state_dict: \"inlet\.bias\"")
class OncePerStorage(Exports):
    """Of parameters in one storage the first is written: the others are taken for tied to it."""

    def changed(self, state: dict[str, Any]) -> dict[str, Any]:
        first: dict[int, str] = {}
        for name, parameter in self.raw.named_parameters():
            first.setdefault(parameter.untyped_storage().data_ptr(), name)
        return {name: state[name] for name in first.values()}


@twin(
    "export",
    "ddp-fp32-w2-model_wrapper_names",
    match=r'Missing key\(s\) in state_dict: "_orig_mod\._fsdp_wrapped_module\._checkpoint_wrapped_module\.norm\.weight"',
    also={
        "names": r"key '_fsdp_wrapped_module\._checkpoint_wrapped_module\.linear\.bias' is no name of the unwrapped model"
    },
)
class CompilersNameEverywhere(AccelerateDriver):
    """``_orig_mod`` is taken out of all names, though nothing is compiled."""

    def export(self, directory: Path) -> None:
        from safetensors.torch import load_file

        super().export(directory)
        if self.world.rank == 0:
            state = load_file(directory / "model.safetensors")
            write(directory, "model.safetensors", {key.replace("_orig_mod.", ""): state[key] for key in state})


@twin(
    "export",
    "ddp-fp32-w2-model_twice-activation_checkpointing",
    match=r"Missing key\(s\) in state_dict: \"inlet\.weight\"",
    also={"names": r"key 'linear\.bias' is no name of the unwrapped model"},
)
class TakenForItsBlock(Exports):
    """A wrapper is known by its attribute, which a model that hands attributes on has of its block: the block is written."""

    def changed(self, state: dict[str, Any]) -> dict[str, Any]:
        model: Any = self.raw
        while hasattr(model, "_checkpoint_wrapped_module"):
            model = model._checkpoint_wrapped_module
        return {name: value.clone() for name, value in model.state_dict().items()}


@twin(
    "parity",
    "ddp-fp32-w2-model_twice",
    "fsdp2-fp32-w2-model_twice",
    match=r"^step 1: the loss is ",
    also={**CLIPPING, **GRADIENTS},
)
class KeepsANumberOnTheModel(Torch):
    """The trainer has a number of its own on the model, under the name of one that the model looks up in its block."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        wrapped = super().wrap(model, precision, cell, device)
        model.gain = 0.5  # type: ignore[assignment]  # a number, no module
        return wrapped


class NotToldOfUnused(TorchDriver):
    """DDP waits for the gradients of all parameters."""

    @property
    def wrap_spec(self) -> WrapSpec:
        return dataclasses.replace(super().wrap_spec, find_unused=False)
