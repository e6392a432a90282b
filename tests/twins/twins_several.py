"""Trainers with two optimizers, one for matrices and one for the rest, and what goes wrong with the second one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .declare import CLIPPING, GRADIENTS, MEMORY, PARITY, Torch, twin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Module

SOUND = "twins.twins_several:Two"


class Together(list[Any]):
    """Several optimizers, or several schedulers, that do everything together."""

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(place): optimizer.state_dict() for place, optimizer in enumerate(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for place, optimizer in enumerate(self):
            optimizer.load_state_dict(state[str(place)])


class Two(Torch):
    """SGD with momentum for matrices, AdamW for the rest, each with a schedule."""

    def make_optimizer(self, model: Module) -> Any:
        from torch.optim import SGD, AdamW

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() == 2]
        rest = [parameter for parameter in trained if parameter.dim() != 2]
        return Together((SGD(matrices, lr=0.05, momentum=0.9), AdamW(self.of_the_second(rest, matrices), lr=1e-2)))

    def of_the_second(self, rest: list[Any], matrices: list[Any]) -> Iterable[Any]:
        """Return the parameters of the second optimizer."""
        return rest

    def make_scheduler(self, optimizer: Any, every: int = 1) -> Any:
        return Together(super(Two, self).make_scheduler(part, every) for part in optimizer)


@twin(
    "optimizer",
    "fsdp2-fp32-w2-model_mlp",
    match=r"trainable parameter 'inlet\.bias' did not move in three steps, on any rank",
    also={
        **PARITY,
        **CLIPPING,
        **MEMORY,
        "names": r"the optimizer of no rank keeps state for 'inlet\.bias'",
        **GRADIENTS,
    },
    sound=SOUND,
)
class SecondNeverSteps(Two):
    """The second optimizer is made, and nobody calls it."""

    def update(self) -> None:
        self.grad_norm = self._clip()
        self.optimizer[0].step()
        self.scheduler.step()


@twin(
    "optimizer",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 0: trainable parameter 'module\.inlet\.weight' is in the optimizer 2 times; expected once",
    also={**PARITY, **CLIPPING, **GRADIENTS},
    sound=SOUND,
)
class MatricesInBoth(Two):
    """The second one is given everything."""

    def of_the_second(self, rest: list[Any], matrices: list[Any]) -> Iterable[Any]:
        return [*rest, *matrices]


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"rank 0: optimizer state 'exp_avg of blocks\.0\.linear\.bias' and 23 others: other values after the load",
    sound=SOUND,
)
class SecondIsNotLoaded(Two):
    """A checkpoint of both, of which the first is put back."""

    def load(self, directory: Any) -> None:
        super().load(directory)
        for state in self.optimizer[1].state.values():
            for value in state.values():
                value.zero_()
