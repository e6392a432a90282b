"""Trainers whose optimizer holds, or moves, something else than what the model computes with."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver

from .declare import CLIPPING, GRADIENTS, MEMORY, PARITY, UNCUT, Accelerate, Torch, twin

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.nn import Module, Parameter

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision

#: Nothing ever reached the optimizer, so it has neither gradients nor state; and torch may refuse to save it.
IDLE = {
    "names": r"the optimizer of no rank keeps state for|Traceback",
    "dtypes": r"is given gradients in nothing|updates nothing",
    "parity": r"Traceback",
    "clipping": r"Traceback",
    "observers": r"Traceback",
    **MEMORY,
}


@twin(
    "optimizer",
    "fsdp2-fp32-w2-model_mlp",
    match=r"rank 0: 12 of 12 tensors in the optimizer are no parameters of the live model \(stale\)"
    r"(?s:.*)'inlet\.weight' is not in the optimizer",
    also=IDLE | GRADIENTS,
)
class MadeBeforeSharding(Torch):
    """The optimizer is made of the parameters that ``fully_shard`` is about to replace."""

    early: torch.optim.Optimizer

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        self.early = super().make_optimizer(model)
        return super().wrap(model, precision, cell, device)

    def make_optimizer(self, model: Module) -> Any:
        return self.early


@twin(
    "optimizer",
    "fsdp1-fp32-w2-model_mlp",
    match=r"14 of 14 tensors in the optimizer are no parameters of the live model \(stale\)"
    r"(?s:.*)'_fsdp_wrapped_module\._flat_param' is not in the optimizer(?s:.*)did not move",
    also={**IDLE, **UNCUT, **GRADIENTS},
)
class MadeBeforeFlattening(MadeBeforeSharding):
    """The twin above with FSDP1's flat parameters."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        for parameter in model.get_submodule("frozen").parameters():
            parameter.requires_grad_(True)  # a flat parameter is trainable or frozen as a whole
        self.early = TorchDriver.make_optimizer(self, model)
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=False)


@twin(
    "optimizer",
    "fsdp1-fp32-w2",
    match=r"21 of 21 tensors in the optimizer are no parameters of the live model \(stale\)(?s:.*)_flat_param' did not move",
    also=IDLE | GRADIENTS,
)
class FlatTogether(Accelerate):
    """accelerate's default, ``use_orig_params=False``, with model and optimizer in one ``prepare``: still so in 1.15."""

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        settings = super().settings(precision, cell)
        settings["fsdp_plugin"].use_orig_params = False
        return settings


@twin(
    "optimizer",
    "ddp-fp32-w2-model_mlp",
    match=r"12 of 12 tensors in the optimizer are no parameters(?s:.*)'module\.inlet\.weight' is not in the optimizer",
    also=IDLE | GRADIENTS,
)
class OfACopy(Torch):
    """The optimizer belongs to a copy of the model, as after a ``deepcopy`` for an average that took the wrong one."""

    def make_optimizer(self, model: Module) -> Any:
        return super().make_optimizer(copy.deepcopy(getattr(model, "module", model)))


def without(optimizer: torch.optim.Optimizer, last: int) -> torch.optim.Optimizer:
    """The twin above without its last parameters."""
    group = optimizer.param_groups[0]
    group["params"] = group["params"][:-last]
    return optimizer


@twin(
    "optimizer",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"trainable parameter '(module\.)?outlet\.bias' is not in the optimizer; expected once(?s:.*)bias' did not move",
    also={
        **PARITY,
        **CLIPPING,
        **MEMORY,
        "names": r"the optimizer of no rank keeps state for 'outlet\.bias'",
        **GRADIENTS,
    },
)
class OneForgotten(Torch):
    """The groups of the optimizer were sorted by name, and one parameter fell through."""

    def make_optimizer(self, model: Module) -> Any:
        return without(super().make_optimizer(model), 1)


LAST_IS_OUT = (
    r"0 of 5 elements of trainable parameter 'module\.outlet\.bias' are in the optimizer(?s:.*)bias' did not move"
)
NO_STATE = {"names": r"the optimizer of no rank keeps state for 'outlet\.bias'"}


@twin(
    "optimizer",
    "zero1-fp32-w2-model_mlp",
    "zero2-bf16_upcast-w2-model_mlp",
    match=LAST_IS_OUT,
    also={**PARITY, **CLIPPING, **MEMORY, **NO_STATE, **GRADIENTS},
)
# The shards of so small a parameter are rounded up by more than what is missing.
@twin("optimizer", "zero3-fp32-w2-model_mlp", match=LAST_IS_OUT, also={**PARITY, **CLIPPING, **NO_STATE, **GRADIENTS})
class OneForgottenZero(AccelerateDriver):
    """The twin above with ZeRO's flat masters."""

    def make_optimizer(self, model: Module) -> Any:
        return without(super().make_optimizer(model), 1)


@twin(
    "optimizer",
    "fsdp2-fp32-w2-model_mlp",
    match=r"trainable parameter '(module\.)?outlet\.bias' is in the optimizer 2 times; expected once",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class OneTwice(Torch):
    """A parameter in two groups: its step is taken twice. torch refuses that in the constructor only."""

    def make_optimizer(self, model: Module) -> Any:
        optimizer = super().make_optimizer(model)
        group = optimizer.param_groups[0]
        group["params"].append(group["params"][-1])
        return optimizer


def with_a_group_that_rests(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The twin above with learning rate 0 for its last parameter."""
    group = optimizer.param_groups[0]
    last: Parameter = group["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.0})
    return optimizer


LAST_STOPS = (
    r"trainable parameter '(_fsdp_wrapped_module\.|module\.)*outlet\.bias' did not move in three steps, on any rank"
)


@twin("optimizer", "fsdp1-fp32-w2-model_mlp", match=LAST_STOPS, also={**PARITY, **CLIPPING, **GRADIENTS})
# In pure bfloat16 losses are too far from the reference to show it; the groups show it.
@twin("optimizer", "fsdp2-bf16_pure-w2-model_mlp", match=LAST_STOPS, also=PARITY)
class NoLearningRate(Torch):
    """One group has learning rate 0: everything is in place and nothing happens."""

    def make_optimizer(self, model: Module) -> Any:
        return with_a_group_that_rests(super().make_optimizer(model))


@twin("optimizer", "fsdp1-bf16_upcast-w2-model_mlp", match=LAST_STOPS, also=PARITY)
@twin("optimizer", "zero2-fp32-w2-model_mlp", match=LAST_STOPS, also={**PARITY, **CLIPPING, **GRADIENTS})
class NoLearningRateAccelerate(AccelerateDriver):
    """The twin above with flat masters, and with FSDP1 upcasting: a parameter whose dtype changes has not moved yet."""

    def make_optimizer(self, model: Module) -> Any:
        return with_a_group_that_rests(super().make_optimizer(model))


@twin(
    "optimizer",
    "fsdp1-fp32-w2-model_mlp",
    match=r"'_fsdp_wrapped_module\.inlet\.weight' did not move in three steps, on any rank",
    also={
        **PARITY,
        **CLIPPING,
        "dtypes": r"no optimizer stepped",
    }
    | GRADIENTS,
)
class NeverSteps(Torch):
    """Gradients are computed and thrown away."""

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = self.tiny.loss(self.model, self.batch_of(number, self.world.rank))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


@twin(
    "optimizer",
    "ddp-fp32-w2",
    "fsdp2-fp32-w2",
    match=r"embed_tokens\.weight' had no gradient in three steps: its state in the optimizer is all zero",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class ClearedTooSoon(Torch):
    """Gradients set to zero between backward and step: weight decay still moves every parameter."""

    def step(self, number: int) -> float:
        loss = self.tiny.loss(self.model, self.batch_of(number, self.world.rank))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=False)
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())


@twin(
    "optimizer",
    "zero2-fp32-w2-model_mlp",
    match=r"trainable parameter 'module\.inlet\.weight' had no gradient in three steps",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class ClearedTooSoonZero(AccelerateDriver):
    """The twin above with flat masters: the loss depends on the parameters by a factor of zero only."""

    def build(self, model: Module) -> None:
        super().build(model)
        loss = self.tiny.loss
        self.tiny = dataclasses.replace(self.tiny, loss=lambda model, batch: 0 * loss(model, batch))
