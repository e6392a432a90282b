"""Trainers that do not compute in 8 bits, and trainers whose scaled loss is not what it should be."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.drivers.torch import TorchDriver

from .declare import GRADIENTS, START, name_of, twin
from .twins_deepspeed import DeepSpeed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision

NONE = r"rank 1: 0 of 15 linear layers are in 8 bits after build; expected all but the first and the last"


@twin("float8", "ddp-fp8-w2", match=NONE)
class NotConverted(TorchDriver):
    """Nobody converts the layers; autocast runs them in bfloat16."""

    def build(self, model: Module) -> None:
        self.precision = _without_8_bits(self.precision)
        super().build(model)


@twin("float8", "zero2-fp8-w2", "zero3-fp8-w2", match=NONE)
class NotConvertedByAccelerate(AccelerateDriver):
    """accelerate gets ``bf16``, like a state that loses its setting under DeepSpeed."""

    def build(self, model: Module) -> None:
        self.precision = _without_8_bits(self.precision)
        super().build(model)


@twin("stages", "zero2-fp8-w2", match=rf"^both: rank 0: 0 of 15 linear layers(?s:.*){NONE}", also={"float8": NONE})
class ForgetsUnderDeepSpeed(AccelerateDriver):
    """8 bits alone and DeepSpeed alone run as asked."""

    def build(self, model: Module) -> None:
        if self.strategy.zero_stage is not None:
            self.precision = _without_8_bits(self.precision)
        super().build(model)


@twin("float8", "zero1-fp8-w2", match=NONE)
class NotConvertedNatively(DeepSpeedDriver):
    """DeepSpeed has no word for 8 bits; nobody converted before."""

    def build(self, model: Module) -> None:
        self.precision = _without_8_bits(self.precision)
        super().build(model)


def _without_8_bits(precision: Any) -> Any:
    return dataclasses.replace(precision, float8=False)


@twin("float8", "fsdp2-fp8-w2", match=r"rank 0: 7 of 15 linear layers are in 8 bits after three steps")
class HalfConverted(TorchDriver):
    """Only the first block is converted."""

    def build(self, model: Module) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        block = self.wrap_spec.block_modules(model)[0]
        convert_to_float8_training(block, config=Float8LinearConfig(emulate=True))
        self.precision = _without_8_bits(self.precision)
        super().build(model)


@twin("float8", "ddp-fp8-w2", match=r"rank 0: 0 tensors were made in 8 bits in a step of 14 such layers")
class ByNameOnly(TorchDriver):
    """The layers have the right class and multiply in bfloat16 all the same."""

    def build(self, model: Module) -> None:
        from torch.nn import Linear

        super().build(model)
        for module in self.model.modules():
            if "Float8" in type(module).__name__:
                module.forward = functools.partial(Linear.forward, module)


@twin("scaling", "ddp-fp16_mixed-w2-model_mlp", "fsdp2-fp16_mixed-w2-model_mlp", match=r"nothing scales the loss")
class NoScaler(TorchDriver):
    """Small gradients are zero in float16."""

    def _scaler(self, device: str) -> Any:
        return None


@twin(
    "scaling",
    "fsdp2-fp16_mixed-w2-model_mlp",
    match=r"^rank 0: the loss is scaled by 1; expected more than 1",
)
class ScaledByOne(TorchDriver):
    """A scaler that scales nothing."""

    def _scaler(self, device: str) -> Any:
        import torch

        return torch.amp.GradScaler(device, init_scale=1.0)


@twin(
    "scaling",
    "fsdp1-fp16_mixed-w2-model_mlp",
    match=r"changed in a step whose gradients overflow; expected it to be skipped",
)
class ScalerOfOneRank(TorchDriver):
    """Each rank looks for infinities in its own shards."""

    def _scaler(self, device: str) -> Any:
        import torch

        return torch.amp.GradScaler(device, init_scale=2.0**10)


class Half(DeepSpeedDriver):
    """Sound: DeepSpeed reads that this CPU computes in float16, which it does, slowly."""

    def build(self, model: Module) -> None:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
        super().build(model)


class Bears(Half, DeepSpeed):
    """DeepSpeed's default: the first overflow leaves the scale as it is."""

    fp16: ClassVar[dict[str, Any]] = {"enabled": True, "initial_scale_power": 10}

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        return {**super().settings(precision, cell), "fp16": self.fp16}


@twin(
    "scaling",
    "zero1-fp16_mixed-w2-model_mlp",
    match=r"rank 1: the scale is 1024 after an overflow at 1024; expected a smaller one",
    sound=name_of(Bears),
)
class StaticScale(Bears):
    """The JSON gives one scale for good: it is too large sooner or later, and every step is skipped from then on."""

    fp16: ClassVar[dict[str, Any]] = {"enabled": True, "loss_scale": 1024.0}


@twin(
    "scaling",
    "zero0-fp16_mixed-w2-model_mlp",
    match=r"rank 1: .* changed in a step whose gradients overflow",
    also={"parity": "the gradient norm is 0", "clipping": "the gradients that the optimizer gets have norm"}
    | GRADIENTS
    | START,
    sound=name_of(Half),
)
class OverflowOverlooked(Half):
    """Nobody looks for infinities: they go into the parameters, which are no numbers from then on."""

    def build(self, model: Module) -> None:
        super().build(model)
        self.optimizer.step = _careless(self.optimizer)


def _careless(optimizer: Any) -> Any:
    """The step of an optimizer that takes any gradients."""

    def step(closure: Any = None) -> bool:
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, copy in zip(low, high, strict=True):
                copy.grad = parameter.grad.float() / optimizer.loss_scale
        optimizer.optimizer.step()
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, copy in zip(low, high, strict=True):
                parameter.data.copy_(copy.data)
        return False

    return step
