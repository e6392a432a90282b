"""Trainers that give the optimizer wrong gradients of some parameters, which clipping and AdamW hide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, PARITY, Torch, twin
from .twins_own_model import SmallNet

if TYPE_CHECKING:
    from torch.nn import Module

#: Its gradient is a hundredth of the norm of all: doubled it is less in that than what rounding does.
BIAS = "blocks.0.norm.bias"
SUMMED = rf"^step 1: .*: the gradient of {BIAS} is (2|1\.9|2\.0)\d* times the reference's \(= the number of ranks\): '{BIAS}' has norm"


@twin(
    "gradients",
    "zero1-bf16_upcast-w2-model_mlp",
    "zero2-bf16_upcast-w2-model_mlp",
    "zero3-bf16_upcast-w2-model_mlp",
    match=SUMMED,
)
class SumsOneBiasZero(AccelerateDriver):
    """One small gradient is added up over the ranks; the others are averaged. No other check sees it."""

    def build(self, model: Module) -> None:
        ranks = self.world.size
        bias = model.get_parameter(BIAS)
        bias.register_hook(lambda gradient: gradient * ranks)  # type: ignore[no-untyped-call]
        super().build(model)


@twin(
    "gradients",
    "ddp-fp16_mixed-w2-model_mlp",
    "fsdp1-fp16_mixed-w2-model_mlp",
    "fsdp2-fp16_mixed-w2-model_mlp",
    match=SUMMED,
    also=PARITY | CLIPPING,
)
class SumsOneBias(Torch):
    """Twin of the one above without flat masters. In float16, which rounds less, the norms show it some steps later."""

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "blocks.0." in name and name.endswith("norm.bias") and parameter.grad is not None:
                parameter.grad.mul_(self.world.size)
        super().update()


@twin(
    "gradients",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^step 1: all ranks: the gradient of inlet\.bias, inlet\.weight, outlet\.bias and 1 others is zero or missing: ",
    also=PARITY | CLIPPING | {"optimizer": "had no gradient in three steps"},
)
class LosesAllButBlocks(Torch):
    """Only the units of FSDP keep their gradients."""

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "blocks." not in name and parameter.grad is not None:
                parameter.grad.zero_()
        super().update()


@twin(
    "gradients",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^step 1: all ranks: the gradient of blocks\.0\.norm\.bias, blocks\.0\.norm\.weight is zero or missing: ",
    also=PARITY | CLIPPING,
)
class DetachedBranch(Torch):
    """The output of a layer is detached, as by ``no_grad`` for what was to be frozen."""

    def build(self, model: Module) -> None:
        model.get_submodule("blocks.0.norm").register_forward_hook(lambda _layer, _inputs, output: output.detach())
        super().build(model)


@twin(
    "gradients",
    "ddp-bf16_upcast-w2",
    match=r"^step 1: rank 0: the gradient of 2\.bias is 2\.\d+ times the reference's: '2\.bias' has norm",
    also=PARITY | CLIPPING,
    sound="twins.twins_own_model:SmallNet",
)
class TriplesOneBias(SmallNet):
    """A bias of a model of its own is wrong."""

    def build(self, model: Module) -> None:
        bias = model.get_parameter("2.bias")
        bias.register_hook(lambda gradient: 3 * gradient)  # type: ignore[no-untyped-call]
        super().build(model)
