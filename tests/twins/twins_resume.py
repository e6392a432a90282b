"""Trainers that go on from a checkpoint as another run than the one that saved it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import distributed

from pytest_distcompat.drivers.accelerate import AccelerateDriver

from .declare import CLIPPING, GRADIENTS, OBSERVERS, PARITY, Torch, twin

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch

#: What the check of the data itself says of a place in the data that was lost.
OTHER_DATA = {"data": r"step 1 after the load is fed other data than in the run that never stopped"}

# accelerate 1.15 fills the state of a fresh optimizer, which is empty, from the checkpoint: with nothing.
twin(
    "resume",
    "fsdp1-fp32-w2-model_mlp",
    match=r"rank 0: the optimizer's state is empty after the load; 24 tensors were saved(?s:.*)loss 2 after the load",
    sound="torch",
)(AccelerateDriver)


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"rank 1: the optimizer's state is empty after the load; 36 tensors were saved(?s:.*)rank 0: loss 2 after",
)
class OptimizerNotLoaded(Torch):
    """Only the model comes back."""

    def load(self, directory: Path) -> None:
        fresh = self.optimizer
        super().load(directory)
        self.optimizer = fresh
        fresh.state.clear()


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 0: the optimizer's state is empty after the load; 36 tensors were saved(?s:.*)rank 0: loss 2 after",
)
class SavedUnderItsHash(Torch):
    """Looks for the optimizer's state under the hash of its name, which each process has another seed for."""

    def save(self, directory: Path) -> None:
        super().save(directory)
        if distributed.get_rank() == 0:
            (directory / f"{hash('optimizer')}.key").touch()

    def load(self, directory: Path) -> None:
        fresh = self.optimizer
        super().load(directory)
        if not (directory / f"{hash('optimizer')}.key").exists():
            self.optimizer = fresh
            fresh.state.clear()


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 0: parameter 'module\.blocks\.0\.linear\.bias' and 11 others: other values after(?s:.*)loss 1 after the load",
)
class ModelNotLoaded(Torch):
    """Only the optimizer comes back."""

    def load(self, directory: Path) -> None:
        before = [value.clone() for value in self.model.state_dict().values()]
        super().load(directory)
        for value, old in zip(self.model.state_dict().values(), before, strict=True):
            value.copy_(old)


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 1: parameter 'module\.blocks\.0\.linear\.bias' and 11 others: other values after the load",
)
class OneRankLoads(ModelNotLoaded):
    """Rank 0 reads the file and does not broadcast it."""

    def load(self, directory: Path) -> None:
        if self.world.rank == 0:
            Torch.load(self, directory)
        else:
            super().load(directory)


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"rank 1: scheduler is at 'last_epoch=0 lr=\[0\.003\]\S* \w+'; saved at 'last_epoch=3",
)
class SchedulerNotLoaded(Torch):
    """The learning rate starts again."""

    def load(self, directory: Path) -> None:
        state = self.scheduler.state_dict()
        super().load(directory)
        self.scheduler.load_state_dict(state)


class Corrupts(Torch):
    """Loads soundly, then corrupts one thing."""

    def corrupt(self) -> None:
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        import torch

        super().load(directory)
        with torch.no_grad():
            self.corrupt()

    def state_of(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[self.model.get_parameter(name)]
        return state


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: optimizer state 'exp_avg_sq of inlet\.weight': other values after the load\nrank 1: optimizer",
)
class OneMomentLost(Corrupts):
    """One tensor of hundreds is zero."""

    def corrupt(self) -> None:
        self.state_of("inlet.weight")["exp_avg_sq"].zero_()


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: parameter 'blocks\.0\.linear\.weight' and 1 others: other values after the load",
)
class Swapped(Corrupts):
    """Two parameters of one shape change places, as when names and tensors are paired by position (accelerate #3982)."""

    def corrupt(self) -> None:
        first, second = (self.model.get_parameter(f"blocks.{n}.linear.weight") for n in (0, 1))
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


@twin(
    "resume",
    "fsdp1-fp32-w2-model_mlp",
    match=r"rank 1: optimizer state 'step of _fsdp_wrapped_module\.\S+' and \d+ others: other values after the load",
)
class CountsOneMore(Corrupts):
    """A load that takes a step of its own: Adam's bias correction is off by one."""

    def corrupt(self) -> None:
        for state in self.optimizer.state.values():
            state["step"] += 1


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 0: parameter '(module\.)?blocks\.0\.linear\.bias' and 11 others: other values after the load",
)
class LoadDecays(Corrupts):
    """A load that makes room for the optimizer's state by a step with zero gradients: weight decay (torch #125708)."""

    def corrupt(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.99)


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"rank 1: lr of the optimizer's group 0 is 0\.01 after the load; 0\.00257\d+ before",
    also={"midway": r"^rank 0: lr of the optimizer's group 0 is 0\.0095 after step 1 of the resumed run"},
)
class LearningRateLost(Corrupts):
    """The scheduler knows where it is, the optimizer does not."""

    def corrupt(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.01


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: weight_decay of the optimizer's group 0 is 0\.0 after the load; 0\.01 before\nrank 1: \S+ of the[^\n]+$",
)
class DecayLost(Corrupts):
    """A setting of the optimizer falls back: five steps are too few for a loss to show it."""

    def corrupt(self) -> None:
        self.optimizer.param_groups[0]["weight_decay"] = 0.0


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: 12 of 12 tensors in the optimizer are no parameters of the live model after the load \(stale\)",
)
class Assigned(Corrupts):
    """``load_state_dict(assign=True)`` puts new tensors into the model, and the optimizer goes on with the old ones."""

    def corrupt(self) -> None:
        self.model.module.load_state_dict(self.model.module.state_dict(), assign=True)


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: parameter 'blocks\.0\.linear\.bias' and 7 others: frozen after the load, and trained before\nrank 1: ",
)
class Frozen(Corrupts):
    """What is loaded is meant for inference, as PEFT's ``from_pretrained`` takes it (``is_trainable=False``)."""

    def corrupt(self) -> None:
        self.model.get_submodule("blocks").requires_grad_(requires_grad=False)


@twin(
    "resume",
    "ddp-bf16_pure-w2-model_mlp",
    match=r"^rank 0: optimizer state 'exp_avg_sq of \S+' and 11 others: another dtype after the load",
)
class StateInFloat32(Corrupts):
    """Moments come back in another dtype, with the same values."""

    # A fused optimizer would refuse them.
    fused = False

    def corrupt(self) -> None:
        for state in self.optimizer.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].float()


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"rank 1: buffer 'module\.scale': other values after the load",
    # The reference has no such statistic.
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class BufferNotLoaded(Torch):
    """A running statistic starts again."""

    def step(self, number: int) -> float:
        self.model.module.scale.mul_(1.01)
        return super().step(number)

    def load(self, directory: Path) -> None:
        scale = self.model.module.scale.clone()
        super().load(directory)
        self.model.module.scale.copy_(scale)


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: loss 1 after the load is [\d.]+; [\d.]+ in the run that never stopped",
    also=OTHER_DATA,
)
class DataFromTheStart(Torch):
    """Everything comes back but the place in the data: the sampler starts again."""

    taken = 0

    def step(self, number: int) -> float:
        self.taken += 1
        return super().step(self.taken - 1)


RATE = r"^rank 0: lr of the optimizer's group 0 is [\d.e-]+ after step 1 of the resumed run; [\d.e-]+ in the run that never"


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=RATE,
    also={"midway": RATE, **PARITY, **CLIPPING, **GRADIENTS},
)
class ScheduleFromTheStart(Torch):
    """A schedule of its own, set at the end of each step, whose count is in no checkpoint; the next two losses are the same."""

    taken = 0

    def step(self, number: int) -> float:
        loss = super().step(number)
        self.taken += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 - 0.05 * self.taken
        return loss


def swap(states: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    """Loads two entries of the state under each other's name."""
    return {**states, first: states[second], second: states[first]}


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: optimizer state 'exp_avg of blocks\.0\.linear\.weight' and 3 others: other values after the load",
)
class SwappedMoments(Torch):
    """The moments of two parameters are saved under each other's name."""

    def save(self, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        state = self._state()
        names = ("blocks.0.linear.weight", "blocks.1.linear.weight")
        state["optimizer"]["state"] = swap(state["optimizer"]["state"], *names)
        save(state, checkpoint_id=directory)
        self.save_random(directory)


def halve(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Half of each value that is trained."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.mul_(0.5)


@twin(
    "resume",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: parameter 'blocks\.0\.linear\.bias' and 11 others: other values after the save\nrank 1: [^\n]+$",
    also={**PARITY, **CLIPPING, **OBSERVERS},
)
class SaveChanges(Torch):
    """Saving changes what is trained; file and memory agree, so that loading shows nothing."""

    def save(self, directory: Path) -> None:
        halve(self.model.parameters())
        super().save(directory)


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: the optimizer took 3 steps with gradients during the load; expected the state to be read from the ch",
)
class TrainsAgain(Torch):
    """Ignores the file and trains again from the start, which leads to the same state, bit by bit."""

    def load(self, directory: Path) -> None:
        for number in range(3):
            self.step(number)


@twin(
    "resume",
    "zero1-fp32-w2-model_mlp",
    match=r"^rank 0: the optimizer took 3 steps with gradients during the load",
)
class TrainsAgainZero(AccelerateDriver):
    """The twin above with ZeRO's flat masters."""

    def load(self, directory: Path) -> None:
        for number in range(3):
            self.step(number)


@twin(
    "resume",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: the loss of step 1 is inf; expected a finite number\nrank 1: the loss of step 1 is inf; [^\n]+$",
    also={"parity": r"^step 1: rank 0: the loss of this step is inf; expected a finite number"},
)
class LossOverflows(Torch):
    """Says that each loss is infinite: two infinities are equal."""

    def step(self, number: int) -> float:
        return super().step(number) * math.inf
