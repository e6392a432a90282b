"""What a driver is: the trainer under test, as a few verbs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.world import World


class Driver:
    """The trainer under test. Subclass it, write five verbs, name the class ``module:attribute`` in your suite.

    Every rank makes one driver for each life and calls its verbs in order. After each verb a probe looks at
    ``self.model``, ``self.optimizer`` and ``self.scheduler``: set them in ``build``, as your trainer has them (wrapped
    is fine). The probe reads, it never calls your code.

    The class is imported in the parent too (to ask ``refuses``), so its module must not import torch at module level
    unless you can bear that cost at collection.
    """

    #: The driver's name on its shelf.
    name: ClassVar[str] = ""
    #: Modules that the fork server imports before the first rank starts; the heavier, the more it saves.
    preload: ClassVar[tuple[str, ...]] = ()
    #: The options of a cell that this driver obeys; a cell with another one is shown as not run, with that reason.
    options: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int] = 100

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None

    def __init__(self, cell: Cell, world: World) -> None:
        self.cell = cell
        self.world = world

    @classmethod
    def unable(cls, cell: Cell, device: str = "cpu") -> str:  # noqa: ARG003 - for those who override it
        """Why this driver cannot run the cell on that device (``cpu``, ``cuda``), as one sentence; empty if it can."""
        for name, _ in cell.options:
            if name not in cls.options:
                return f"the {cls.name or cls.__name__} driver does not speak option {name!r}"
        return ""

    def plain_model(self) -> Module:
        """The model that a user hands to the trainer, unwrapped, on the CPU, in the precision's load dtype."""
        raise NotImplementedError

    def build(self, model: Module) -> None:
        """Make the trainer around the model: wrap it, make the optimizer and scheduler, set the three attributes."""
        raise NotImplementedError

    def step(self, number: int) -> float:
        """One optimizer step on batch ``number`` of this rank; the loss on this rank."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Write a checkpoint that training can go on from. The directory exists and is the same for all ranks."""
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        """Go on from a checkpoint that ``save`` wrote in another process group."""
        raise NotImplementedError

    def trainer_world_size(self) -> int | None:
        """How many ranks the trainer believes there are; None where it has no opinion."""
        return None
