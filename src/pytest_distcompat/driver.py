"""What a driver is: the trainer under test, as a few methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.world import World

#: The actions that are an optimizer step.
STEP_ACTIONS = frozenset({"step", "overflow"})

#: The actions that every driver has, or in place of the last four a ``train``.
NEEDED = ("build_model", "build", "step", "save", "load")

#: Told after each action: its name and, after a step, the loss on this rank.
Seen = Callable[..., None]


@dataclass(frozen=True)
class Plan:
    """What one training has to do: ``actions`` of ``build``, ``load``, ``step`` (``overflow``) and ``save``, in order.

    ``first_step`` is the number of the first step. The directories exist and are the same for all ranks.
    """

    actions: tuple[str, ...]
    first_step: int
    save_to: Path
    load_from: Path

    @property
    def last_step(self) -> int:
        """How many steps have been taken when the plan is done, those before it included."""
        return self.first_step + len(self.steps)

    @property
    def steps(self) -> tuple[str, ...]:
        """The actions that are a step."""
        return tuple(action for action in self.actions if action in STEP_ACTIONS)


def _missing(driver: Driver, action: str) -> str:
    return f"{type(driver).__name__} has no {action}(); a driver needs {', '.join(NEEDED)}"


class Driver:
    """The trainer under test. Subclass it, write five methods, name the class ``module:attribute`` in your suite.

    Every rank makes one driver for each run and calls its actions in order. After each action a probe looks at
    ``self.model``, ``self.optimizer`` and ``self.scheduler``: set them in ``build``, as your trainer has them (wrapped
    is fine; of several optimizers, as ``torch.optim.Muon`` wants them, a list). The probe reads, it never calls your code.

    The class is imported in the parent too (to ask what it can do), so its module must not import torch at module level
    unless you can bear that cost at collection.

    ``build_model build step save load`` are needed; ``export reload evaluate reference overflow`` bring further checks,
    which without them are shown as not applicable.
    """

    #: The driver's name on its registry.
    name: ClassVar[str] = ""
    #: Modules that the fork server imports before the first rank starts; the heavier, the more it saves.
    preload: ClassVar[tuple[str, ...]] = ()
    #: The options of a cell that this driver obeys; a cell with another one is shown as not run, with that reason.
    options: ClassVar[tuple[str, ...]] = ()
    #: The libraries whose known issues concern this driver: ``("accelerate", "torch")``.
    libraries: ClassVar[tuple[str, ...]] = ()
    #: Strategies whose checkpoints can be loaded at another world size.
    reshards: ClassVar[tuple[str, ...]] = ()
    #: Strategy to the other one that can load its checkpoints.
    portable: ClassVar[Mapping[str, str]] = {}
    order: ClassVar[int] = 100

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    #: The gradient scaler of fp16, where there is one.
    scaler: Any = None
    #: The gradient norm of the last step, before clipping, if the trainer tells it.
    grad_norm: float | None = None
    #: How many tokens (or samples) this rank learned from in the last step.
    tokens: int = 0
    #: Class names of the modules that are to be sharded, checkpointed and compiled one by one.
    blocks: tuple[str, ...] = ()
    #: Names of the modules that are to be left out of the sharding.
    ignored_modules: tuple[str, ...] = ()

    def __init__(self, cell: Cell, world: World) -> None:
        self.cell = cell
        self.world = world

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:  # noqa: ARG003 - for those who override it
        """Why this driver cannot run the cell on that device (``cpu``, ``cuda``), as one sentence; None if it can."""
        for name, _ in cell.options:
            if name not in cls.options:
                return f"the {cls.name or cls.__name__} driver does not speak option {name!r}"
        return None

    @classmethod
    def can(cls, action: str) -> bool:
        """Whether the driver has that optional methods."""
        return getattr(cls, action) is not getattr(Driver, action)

    def build_model(self) -> Module:
        """The model that a user hands to the trainer, unwrapped, on the CPU, in the precision's load dtype."""
        raise NotImplementedError(_missing(self, "build_model"))

    def build(self, model: Module) -> None:
        """Make the trainer around the model: wrap it, make the optimizer and scheduler, set the three attributes."""
        raise NotImplementedError(_missing(self, "build"))

    def step(self, number: int) -> float:
        """One optimizer step on batch ``number`` of this rank; the loss on this rank."""
        raise NotImplementedError(_missing(self, "step"))

    def overflow(self, number: int) -> float:
        """The same as ``step``, but on the highest rank alone gradients of the first layer, and of no other, are infinite."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Write a checkpoint that training can go on from. The directory exists and is the same for all ranks."""
        raise NotImplementedError(_missing(self, "save"))

    def load(self, directory: Path) -> None:
        """Go on from a checkpoint that ``save`` wrote in another process group."""
        raise NotImplementedError(_missing(self, "load"))

    def train(self, model: Module, plan: Plan, seen: Seen) -> None:
        """Do the plan's actions in order and call ``seen(action)``, after a step ``seen("step", loss)``, after each.

        For a trainer that does several actions in one call, and tells of them by callbacks, override this instead of the
        actions themselves.
        """
        number = plan.first_step
        for action in plan.actions:
            if action in STEP_ACTIONS:
                seen(action, getattr(self, action)(number))
                number += 1
                continue
            if action == "build":
                self.build(model)
            elif action == "save":
                self.save(plan.save_to)
            else:
                self.load(plan.load_from)
            seen(action)

    def export(self, directory: Path) -> None:
        """Write the trained weights for others to use: whole, under the unwrapped model's names, no optimizer."""
        raise NotImplementedError

    def reload(self, directory: Path) -> Module:
        """The unwrapped model from what ``export`` wrote, as its users load it; in one process, without the trainer."""
        raise NotImplementedError

    def evaluate(self, model: Module) -> torch.Tensor:
        """What the model (trained or reloaded) computes on one fixed batch, the same on every rank; any shape.

        What ``torch.compile`` wraps runs as it is written here.
        """
        raise NotImplementedError

    def reference(self, model: Module, number: int, ranks: int) -> float:
        """Step ``number`` of the same training in one process, without the trainer: the loss.

        ``model`` is the unwrapped model, in float32; learn from the batches of all ``ranks``, the same numbers of them. Set
        ``optimizer`` and ``grad_norm`` as ever.
        """
        raise NotImplementedError

    def saved_name(self, key: str) -> str:
        """Return the unwrapped model's name of what the trainer saves under ``key``, where it maps names when it saves.

        Called for each key of a model or an optimizer in each saved file.
        """
        return key

    def trainer_world_size(self) -> int | None:
        """How many ranks the trainer believes there are; None where it has no opinion."""
        return None
