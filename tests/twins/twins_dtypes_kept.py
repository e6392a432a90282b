"""Trainers that widen or narrow frozen parameters, or accumulate or reduce gradients in another dtype than the option's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.cell import Cell

from .declare import Accelerate, Torch, twin
from .twins_deepspeed import DeepSpeed
from .twins_dtypes import SOUND, Upcasts

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.nn import Module

    from pytest_distcompat.precisions import Precision


@twin(
    "dtypes",
    "fsdp2-bf16_upcast-w2-model_mlp",
    match=r"^rank 0: 2 of 2 frozen parameters are stored in float32, first '(module\.)?frozen\.weight'; loaded in bfloat16\n"
    r"rank 1: 2 of 2 frozen parameters are stored in float32, .*$",
    sound=SOUND,
)
class FrozenUpcast(Upcasts):
    """Masters for all, the frozen layer's too: a LoRA run then holds its base model twice as large."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return super().wrap(model.float(), precision, cell, device)


@twin(
    "dtypes",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: 2 buffers are in bfloat16, first '(module\.)?scale'; expected float32\nrank 1: 2 buffers .*$",
)
class BuffersCast(Torch):
    """Buffers go the way of the activations: rotary frequencies or running means lose their digits so."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.bfloat16())
        return super().wrap(model, precision, cell, device)


@twin(
    "dtypes",
    "zero1-bf16_upcast-w2-model_mlp-grad_accum_dtype_fp32",
    "zero2-bf16_upcast-w2-model_mlp-grad_accum_dtype_fp32",
    "zero3-bf16_upcast-w2-model_mlp-grad_accum_dtype_fp32",
    match=r"^rank 0: gradients are added up in bfloat16; expected float32\n"
    r"rank 1: gradients are added up in bfloat16; expected float32$",
)
class DataTypesLost(DeepSpeed):
    """The section ``data_types`` of the JSON is dropped on the way: sums of many micro-batches lose their small parts."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        written = super().settings(precision, cell)
        return {key: value for key, value in written.items() if key != "data_types"}


TRAVELS = r"^rank 0: gradients were reduced in bfloat16; expected float32\nrank 1: gradients were reduced in bfloat16; expected float32$"


@twin(
    "dtypes",
    "fsdp1-bf16_upcast-w2-model_mlp-reduce_dtype_fp32",
    "fsdp2-bf16_upcast-w2-model_mlp-reduce_dtype_fp32",
    match=TRAVELS,
)
class PolicyLost(Accelerate):
    """The trainer's policy is dropped on the way, and accelerate makes one of its own."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        return super().settings(precision, cell.without("reduce_dtype"))


@twin(
    "dtypes",
    "zero1-bf16_upcast-w2-model_mlp-reduce_dtype_fp32",
    "zero3-bf16_upcast-w2-model_mlp-reduce_dtype_fp32",
    match=TRAVELS,
)
class CommunicationTypeMisspelt(DeepSpeed):
    """DeepSpeed passes over keys of its JSON that it does not know."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        written = dict(super().settings(precision, cell))
        written["communication_dtype"] = written.pop("communication_data_type")
        return written
