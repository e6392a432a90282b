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

#: For ``also``: what checks of the outcome say wherever a defect makes it another training, gives the optimizer other
#: gradients, makes it keep more or less, begins with other values, averages over something else, or leaves FSDP out.
PARITY = {"parity": r"^step \d+: .* is .* in the reference"}
CLIPPING = {"clipping": r"^step \d+: .*the gradients that the optimizer gets have norm"}
GRADIENTS = {"gradients": r"^step [123]: .*: the gradient of "}
MEMORY = {"memory": r"^all ranks together keep \d+ elements of|no rank's optimizer keeps anything"}
OBSERVERS = {"observers": r"^rank 0: parameter .* and \d+ others: other values after the (save|export)"}
START = {"start": r"^(parameter|master) .*: other values after build than were loaded"}
MEAN = {"mean": r"^gradients give each row or each micro-batch.* the same weight; the driver says each token"}
UNCUT = {"units": r"FSDP's units are (nothing|the root); expected 'blocks\.0', 'blocks\.1', the root"}


@dataclass(frozen=True)
class Twin:
    """One wrong driver in one cell.

    ``match`` is what the check must say. ``also`` names the other checks that the same defect rightly concerns, with
    what they must say; every check that is not named must stay silent. ``sound`` is the driver that passes the check
    in the same cell. A ``daily`` one is no nightly test though another twin of its check comes first.
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
        """Reads aloud: ``active-NeverSyncs-ddp-fp32-w2-model_mlp``."""
        return f"{self.check}-{self.driver.rpartition(':')[2]}-{self.cell.id}"


#: All that were declared so far, in the order of their modules.
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
        name = name_of(driver)
        names = [str(base.__dict__.get("name")) for base in driver.__mro__]
        base = sound or next(name for name in names if name in DRIVERS.names())
        TWINS.extend(Twin(name, check, Cell.parse(cell), match, also or {}, base, daily) for cell in cells)
        return driver

    return declare


def name_of(driver: type[Driver]) -> str:
    """How a rank finds the driver: by its name on the registry, or as module:attribute."""
    built_in = driver.__module__.startswith("pytest_distcompat.")
    return driver.name if built_in else f"{driver.__module__}:{driver.__name__}"


class Torch(TorchDriver):
    """The torch driver with the wrapping of the model as one more action, to be got wrong."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sound = self.strategy.torch
        self.strategy = dataclasses.replace(self.strategy, torch=self._wrap_as)

    def _wrap_as(self, *arguments: Any) -> Module:
        """Keep what the sound wrapping is given besides, and wrap."""
        self.given: WrapSpec = arguments[4]
        return self.wrap(*arguments[:4])

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        """As the strategy does it."""
        assert self._sound is not None
        return self._sound(model, precision, cell, device, self.given)

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Without accumulation there is nothing to skip, and what is wrapped wrongly has no method to skip it by."""
        return super()._synchronised(last) if self.accumulate > 1 else contextlib.nullcontext()


class Accelerate(AccelerateDriver):
    """The accelerate driver with the Accelerator's keyword arguments as one more action, to be got wrong."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sound = self.strategy.accelerate
        self.strategy = dataclasses.replace(self.strategy, accelerate=lambda *args: self.settings(*args[:2]))

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        """As the strategy says it."""
        assert self._sound is not None
        return self._sound(precision, cell, self.wrap_spec)
