"""Several optimizers in one object, as libraries that take one are given them, and what such objects get wrong."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pytest_distcompat.drivers.trainer import TrainerDriver
from pytest_distcompat.ext.upstream.drivers._joined import Joined

from .declare import CLIPPING, GRADIENTS, MEMORY, PARITY, twin


class FirstAlone(Joined):
    """Steps the first of its optimizers alone."""

    def step(self, closure: Any = None) -> Any:
        self.parts[0].step()


@twin(
    "optimizer",
    "ddp-fp32-w2-model_mlp-optimizer_muon",
    match=r"trainable parameter 'module\.inlet\.bias' did not move in three steps, on any rank",
    also={
        **PARITY,
        **CLIPPING,
        **MEMORY,
        "names": r"the optimizer of no rank keeps state for 'inlet\.bias'",
    },
)
class AdamWNeverSteps(TrainerDriver):
    """Biases and norms are in the optimizer, and nobody updates them."""

    def optimizer_class(self) -> tuple[Any, dict[str, Any]] | None:
        return FirstAlone, {"make": self.muon_and_adamw}


@twin(
    "parity",
    "ddp-fp32-w2-model_mlp-optimizer_sgd",
    match=r"^step 1: all ranks: momentum of .* is 0; 0\.9 in the reference",
    also={**CLIPPING, **GRADIENTS},
)
class ArgumentsLost(TrainerDriver):
    """The optimizer is made by its name, without its own arguments: SGD has no momentum."""

    def arguments(self, plan: Any) -> dict[str, Any]:
        return super().arguments(plan) | {"optim_args": None}


class Forgetful(Joined):
    """Its optimizers begin anew after a load, whatever the object shows."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # accelerate loads the empty state once while it prepares an optimizer.
        for part in self.parts if self.state else ():
            part.state = defaultdict(dict)


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp-optimizer_muon",
    match=r"loss 2 after the load",
)
class MomentumForgotten(TrainerDriver):
    """What is loaded does not reach the optimizers that step."""

    def optimizer_class(self) -> tuple[Any, dict[str, Any]] | None:
        return Forgetful, {"make": self.muon_and_adamw}
