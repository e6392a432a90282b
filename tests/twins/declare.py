"""How a deliberately wrong driver is declared: which check must catch it, in which cell, with which words."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS, Driver
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.precisions import Precision
    from pytest_distcompat.strategies import WrapSpec

AnyDriver = TypeVar("AnyDriver", bound=type[Driver])

# For ``also``: the findings of checks of the outcome, by the consequence of a defect.
#: The losses differ.
PARITY = {"parity": r"^step \d+: .* is .* in the reference"}
#: The optimizer gets gradients of another total norm.
CLIPPING = {"clipping": r"^step \d+: .*the gradients that the optimizer gets have norm"}
#: The optimizer gets another gradient for a parameter.
GRADIENTS = {"gradients": r"^step [123]: .*: the gradient of "}
#: The optimizer keeps more or less state.
MEMORY = {"memory": r"^all ranks together keep \d+ elements of|no rank's optimizer keeps anything"}
#: Saving or exporting changes what is trained.
OBSERVERS = {"observers": r"^rank 0: parameter .* and \d+ others: other values after the (save|export)"}
#: Training starts from other values.
START = {"start": r"^(parameter|master) .*: other values after build than were loaded"}
#: Gradients are averaged over something else.
MEAN = {"mean": r"^gradients give each row or each micro-batch.* the same weight; the driver says each token"}
#: FSDP leaves blocks out.
UNCUT = {"units": r"FSDP's units are (nothing|the root); expected 'blocks\.0', 'blocks\.1', the root"}


@dataclass(frozen=True)
class Twin:
    """A driver with one defect, in one cell.

    Attributes:
        driver: The name by which a rank finds the driver.
        check: The check that must catch the defect.
        cell: The cell in which it does.
        match: A regular expression for the check's finding.
        also: Other checks that the defect rightly concerns, with what they must say. All others must stay silent.
        sound: The driver without the defect, which passes the check in this cell.
        daily: Whether this twin runs every day, though it is not the first of its check.
    """

    driver: str
    check: str
    cell: Cell
    match: str
    also: Mapping[str, str]
    sound: str
    daily: bool = False

    @property
    def id(self) -> str:
        """Return the id of its test: ``active-NeverSyncs-ddp-fp32-w2-model_mlp``."""
        return f"{self.check}-{self.driver.rpartition(':')[2]}-{self.cell.id}"


#: All declared twins, in the order of their modules.
TWINS: list[Twin] = []


def twin(
    check: str,
    *cells: str,
    match: str,
    also: Mapping[str, str] | None = None,
    sound: str = "",
    daily: bool = False,
) -> Callable[[AnyDriver], AnyDriver]:
    """Declare the driver below as the wrong twin of ``sound`` (the built-in driver it derives from)."""

    def declare(driver: AnyDriver) -> AnyDriver:
        base = sound or built_in_base(driver)
        for cell in cells:
            TWINS.append(Twin(name_of(driver), check, Cell.parse(cell), match, also or {}, base, daily))
        return driver

    return declare


def built_in_base(driver: type[Driver]) -> str:
    """Return the name of the built-in driver that the class derives from."""
    for base in driver.__mro__:
        name = str(base.__dict__.get("name"))
        if name in DRIVERS.names():
            return name
    raise LookupError(f"{driver.__name__} derives from no built-in driver")


def name_of(driver: type[Driver]) -> str:
    """Return the name by which a rank finds the driver: its name in the registry, or ``module:attribute``."""
    built_in = driver.__module__.startswith("pytest_distcompat.")
    return driver.name if built_in else f"{driver.__module__}:{driver.__name__}"


class Torch(TorchDriver):
    """The torch driver with a method ``wrap`` that wraps the model, for twins to override."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sound = self.strategy.torch
        self.strategy = dataclasses.replace(self.strategy, torch=self._wrap_as)

    def _wrap_as(self, *arguments: Any) -> Module:
        """Keep the wrap specification for the sound wrapping, and wrap."""
        self.given: WrapSpec = arguments[4]
        return self.wrap(*arguments[:4])

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        """Wrap the model as the strategy does."""
        assert self._sound is not None
        return self._sound(model, precision, cell, device, self.given)

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        # A model that is wrapped wrongly may lack ``no_sync``, which only accumulation needs.
        if self.accumulate == 1:
            return contextlib.nullcontext()
        return super()._synchronised(last)


class Accelerate(AccelerateDriver):
    """The accelerate driver with a method ``settings`` for the Accelerator's arguments, for twins to override."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sound = self.strategy.accelerate
        self.strategy = dataclasses.replace(self.strategy, accelerate=lambda *args: self.settings(*args[:2]))

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        """Return the arguments as the strategy gives them."""
        assert self._sound is not None
        return self._sound(precision, cell, self.wrap_spec)
