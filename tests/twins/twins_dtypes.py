"""Trainers that store, compute, reduce or optimize in another dtype than the mode promises."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import _fsdp

from .declare import CLIPPING, GRADIENTS, MEMORY, PARITY, Accelerate, Torch, twin

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


class Upcasts(Torch):
    """Sound: plain torch, with the float32 copy that it leaves to the user."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return super().wrap(upcast(model, cell), precision, cell, device)


def upcast(model: Module, cell: Cell) -> Module:
    """Masters for what is trained; for all where one flat parameter, which has one dtype, holds both."""
    for parameter in model.parameters():
        if parameter.requires_grad or cell.strategy == "fsdp1":
            parameter.data = parameter.data.float()
    return model


SOUND = "twins.twins_dtypes:Upcasts"

# The case that the check grew from: a model loaded in bfloat16, and nobody upcasts.
twin(
    "dtypes",
    "fsdp1-bf16_upcast-w2",
    "fsdp2-bf16_upcast-w2",
    match=r"trainable parameters are stored in bfloat16(?s:.*)AdamW updates bfloat16 masters; expected float32"
    r"(?s:.*)is given gradients in bfloat16(?s:.*)keeps state in bfloat16",
    also=PARITY,
    sound="accelerate",
)(TorchDriver)
twin(
    "dtypes",
    "ddp-bf16_upcast-w2-model_mlp",
    match=r"gradients were reduced in bfloat16; expected float32(?s:.*)AdamW updates bfloat16 masters; expected float32",
    also=PARITY,
    sound=SOUND,
)(TorchDriver)
twin(
    "dtypes",
    "ddp-bf16_upcast-w2-model_mlp",
    match=r"AdamW updates bfloat16 masters; expected float32",
    also=PARITY,
    sound=SOUND,
)(AccelerateDriver)


@twin(
    "dtypes",
    "fsdp1-bf16_upcast-w2-model_mlp",
    "fsdp2-bf16_upcast-w2-model_mlp",
    match=r"matrix products ran in float32; expected bfloat16(?s:.*)gradients were reduced in float32; expected bfloat16",
    sound=SOUND,
)
class NoPolicy(Upcasts):
    """float32 throughout: the mixed-precision policy got lost on the way."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return super().wrap(model.float(), PRECISIONS.get("fp32"), cell, device)


@twin("dtypes", "ddp-bf16_upcast-w2-model_mlp", match=r"matrix products ran in float32; expected bfloat16", sound=SOUND)
class NoAutocast(Upcasts):
    """DDP without autocast."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return super().wrap(model.float(), precision, cell, device)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


@twin(
    "dtypes",
    "fsdp2-bf16_upcast-w2",
    match=r"matrix products ran in bfloat16 and float32; expected bfloat16",
    sound=SOUND,
)
class LastLayerInFloat32(Upcasts):
    """The policy covers all but the last layer, which is a unit of its own."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.fsdp import fully_shard

        head = model.float().get_submodule("lm_head")
        head.register_forward_pre_hook(lambda module, inputs: tuple(x.float() for x in inputs))
        fully_shard(head, mesh=_fsdp.mesh(cell, device))
        return super().wrap(model, precision, cell, device)


@twin(
    "dtypes",
    "fsdp2-bf16_upcast-w2-model_mlp",
    match=r"^rank 0: gradients were reduced in float32; expected bfloat16\nrank 1: gradients were reduced in float32; expected bfloat16$",
    sound=SOUND,
)
class ReducesInFloat32(Upcasts):
    """Twice the traffic that was asked for."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        upcast(model, cell)
        for block in self.wrap_spec.block_modules(model):
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model


def in_bfloat16(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Keeps its moments in bfloat16 from one step to the next."""
    import torch

    def cast(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(dtype)

    optimizer.register_step_pre_hook(lambda it, args, kwargs: cast(it, torch.float32))
    optimizer.register_step_post_hook(lambda it, args, kwargs: cast(it, torch.bfloat16))
    return optimizer


@twin(
    "dtypes",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: AdamW keeps state in bfloat16; expected float32\nrank 1: AdamW keeps state in bfloat16; expected float32$",
)
class StateInBfloat16(Torch):
    """Moments kept in bfloat16 beside float32 parameters."""

    def make_optimizer(self, model: Module) -> Any:
        return in_bfloat16(super().make_optimizer(model))


@twin(
    "dtypes",
    "fsdp2-fp32-w2-model_mlp",
    match=r"rank 1: AdamW keeps state in bfloat16; expected float32",
    also={
        "optimizer": r"trainable parameter 'outlet\.bias' is not in the optimizer",
        "names": r"the optimizer of no rank keeps state for 'outlet\.bias'",
        **PARITY,
        **CLIPPING,
        **MEMORY,
    }
    | GRADIENTS,
)
class SecondOptimizer(Torch):
    """A second optimizer for the last parameter, which keeps its moments in bfloat16, steps after the first one."""

    second: torch.optim.Optimizer

    def make_optimizer(self, model: Module) -> Any:
        from torch.optim import AdamW

        optimizer = super().make_optimizer(model)
        group = optimizer.param_groups[0]
        self.second = in_bfloat16(AdamW([group["params"].pop()]))
        return optimizer

    def step(self, number: int) -> float:
        loss = super().step(number)
        self.second.step()
        return loss


@twin(
    "dtypes",
    "fsdp2-bf16_pure-w2-model_mlp",
    match=r"stored in float32, first '\S+'; expected bfloat16(?s:.*)matrix products ran in float32"
    r"(?s:.*)reduced in float32(?s:.*)AdamW updates float32 masters; expected bfloat16",
    sound="torch",
)
class PureInFloat32(Upcasts):
    """Asked to keep everything in bfloat16, and quietly upcasts: twice the memory."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return super().wrap(model.float(), precision, cell, device)


class OtherConfig(Accelerate):
    """The DeepSpeed config is written for another precision than that of the cell."""

    config_precision = ""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        return super().settings(PRECISIONS.get(self.config_precision), cell)


@twin(
    "dtypes",
    "zero2-bf16_upcast-w2-model_mlp",
    "zero3-bf16_upcast-w2-model_mlp",
    match=r"AdamW updates bfloat16 masters; expected float32(?s:.*)AdamW keeps state in bfloat16; expected float32",
    also=PARITY,
)
class MastersInBfloat16(OtherConfig):
    """``bf16_master_weights_and_grads``: DeepSpeed without its float32 masters."""

    config_precision = "bf16_pure"


@twin("dtypes", "zero2-bf16_pure-w2-model_mlp", match=r"AdamW updates float32 masters; expected bfloat16")
class MastersInFloat32(OtherConfig):
    """Asked for its low-precision mode, DeepSpeed runs the usual one."""

    config_precision = "bf16_upcast"


@twin(
    "dtypes",
    "zero1-bf16_upcast-w2-model_mlp",
    match=r"stored in float32, first 'module\.inlet\.weight'; expected bfloat16(?s:.*)matrix products ran in float32"
    r"(?s:.*)reduced in float32; expected bfloat16",
)
class ZeroInFloat32(OtherConfig):
    """A trainer that upcasts what it loads, and leaves out the ``bf16`` section of the DeepSpeed config."""

    config_precision = "fp32"

    def build(self, model: Module) -> None:
        # accelerate refuses a mixed_precision that contradicts the config; this trainer asks for none.
        self.precision = PRECISIONS.get("fp32")
        super().build(model.float())
