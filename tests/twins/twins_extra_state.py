"""Trainers that lose state beside model and optimizer: an average of the weights, and the place in the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.ext.upstream.drivers._average import DECAY, AverageOfWeights
from pytest_distcompat.trace import ExtraState

from .declare import Torch, name_of, twin

if TYPE_CHECKING:
    from pathlib import Path

    from torch.nn import Module


class Averages(Torch):
    """Sound: averages the weights over steps, counts the rows that it has seen, and saves both."""

    extra_state: ClassVar[Mapping[str, ExtraState]] = {"average": ExtraState(), "seen": ExtraState(alike=False)}
    decay = 0.5

    def build(self, model: Module) -> None:
        super().build(model)
        self.average = {
            name: named_parameter.detach().clone() for name, named_parameter in self.model.named_parameters()
        }
        self.seen = self.world.rank

    def step(self, number: int) -> float:
        loss = super().step(number)
        self.move_average()
        self.seen += self.world.size
        return loss

    def move_average(self) -> None:
        """Move the average towards the weights."""
        for name, parameter in self.model.named_parameters():
            self.average[name].lerp_(parameter.detach(), self.decay)

    def save(self, directory: Path) -> None:
        import torch

        super().save(directory)
        torch.save(self.extra(), directory / f"extra_{self.world.rank}.state")

    def extra(self) -> dict[str, Any]:
        """Return what is saved beside model and optimizer."""
        return {"average": self.average, "seen": self.seen}

    def load(self, directory: Path) -> None:
        import torch

        super().load(directory)
        for name, value in torch.load(directory / f"extra_{self.world.rank}.state", weights_only=False).items():
            setattr(self, name, value)


@twin(
    "extra_state",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: average\.(module\.)?blocks\.0\.linear\.bias.* is another after the load than was saved\nrank 1: ",
    sound=name_of(Averages),
)
class AverageNotSaved(Averages):
    """After a load the average begins with the weights that the model was built with."""

    def extra(self) -> dict[str, Any]:
        return {"seen": self.seen}


@twin(
    "extra_state",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 1: average\.module\.blocks\.0\.linear\.bias is another than on rank 0 after step 1\n"
    r"rank 1: average has not changed in three steps$",
    sound=name_of(Averages),
)
class AverageOnRankZero(Averages):
    """Only the rank that evaluates keeps the average."""

    def move_average(self) -> None:
        if self.world.rank == 0:
            super().move_average()


@twin(
    "extra_state",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: seen is another after the load than was saved\nrank 1: ",
    sound=name_of(Averages),
)
class CountsFromTheStart(Averages):
    """The place in the data is saved, and not loaded."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.seen = self.world.rank


@twin(
    "extra_state",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: seen is another in step 1 after the load than in the run that never stopped\nrank 1: ",
    sound=name_of(Averages),
)
class CountsItsOwnSteps(Averages):
    """The place in the data comes back, and goes on from the steps of this process."""

    steps = 0

    def step(self, number: int) -> float:
        loss = super().step(number)
        self.steps += 1
        self.seen = self.world.rank + self.steps * self.world.size
        return loss


@twin(
    "extra_state",
    "zero2-fp32-w2-model_mlp",
    match=r"model\.global_steps is another after the load than was saved",
)
class EngineCountsAnew(DeepSpeedDriver):
    """The engine forgets at a load how many steps it has taken."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.model.global_steps = 0


@twin(
    "extra_state",
    "fsdp2-fp32-w2-model_mlp-ema",
    match=r"^rank 0: averaged_model\.n_averaged is another after the load than was saved\nrank 1: ",
    daily=True,
)
class AverageBuiltAnew(TorchDriver):
    """After a load the average is that of the built model."""

    def load(self, directory: Path) -> None:
        average, self.averaged_model = self.averaged_model, None
        super().load(directory)
        self.averaged_model = average


@twin(
    "extra_state",
    "ddp-fp32-w2-model_mlp-ema",
    match=r"^rank 0: averaged_model\..* is another after the load than was saved\nrank 1: ",
)
class AverageNotRegistered(AccelerateDriver):
    """The average is kept, and accelerate not told of it."""

    def _register(self) -> None:
        super()._register()
        self.accelerator._custom_objects.remove(self.averaged_model)


@twin(
    "extra_state",
    "zero2-fp32-w2-model_mlp",
    match=r"^rank 0: progress\.state_dict\.batches is another after the load than was saved\nrank 1: ",
)
class ProgressNotLoaded(AccelerateDriver):
    """What is registered is saved, and forgotten after a load."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.progress.batches = 0


@twin(
    "extra_state",
    "zero3-fp32-w2-model_mlp-ema",
    match=r"^rank 0: averaged_model has not changed in three steps\nrank 1: averaged_model has not changed in three steps$",
    also={"parity": r"^step 1: averaged_model: state_dict\.[\w.]+ has norm 0; [\d.]+ in the reference"},
)
class AveragesPlaceholders(AccelerateDriver):
    """The average is of what ZeRO-3 leaves on a rank between two steps: of empty tensors."""

    def make_average(self, model: Module) -> Any:
        return _OfLocalWeights(model)


class _OfLocalWeights(AverageOfWeights):
    """Gathers nothing."""

    def __init__(self, model: Module) -> None:
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: Module) -> None:
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter.detach(), 1 - DECAY)


@twin(
    "parity",
    "fsdp1-fp32-w2-model_mlp-ema",
    "fsdp2-fp32-w2-model_mlp-ema",
    match=r"^step 1: averaged_model: module\.[\w.]+ has norm [\d.]+; [\d.]+ in the reference \(.* off, 2\.0e-04 allowed\)$",
)
class AveragesBeforeTheStep(TorchDriver):
    """The average takes in the weights of the step before: it changes, comes back, and is alike on all ranks."""

    def update(self) -> None:
        self.update_average(self.model)
        average, self.averaged_model = self.averaged_model, None
        super().update()
        self.averaged_model = average
