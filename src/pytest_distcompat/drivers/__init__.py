"""The registry of drivers: the trainers under test. Each module is named after the library it drives."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers._declared import check_declared
from pytest_distcompat.drivers._tiny import TinyDriver
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.registry import Registry

DRIVERS: Registry[type[Driver]] = Registry(__name__, Driver, "driver")  # type: ignore[arg-type]  # holds the classes themselves

__all__ = ["DRIVERS", "Driver", "TinyDriver", "find_driver", "preload_of"]


def find_driver(name: str) -> type[Driver]:
    """The driver of that name, or the class behind ``module:attribute``. Raises UsageProblem."""
    if ":" not in name:
        return DRIVERS.get(name)
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        told = "; install it, or have pytest find it: pythonpath = DIRECTORY in its settings" if missing else ""
        raise UsageProblem(f"driver {name!r}: {error}{told}") from error
    if not (isinstance(found, type) and issubclass(found, Driver)):
        raise UsageProblem(f"driver {name!r} is {found!r}; expected a subclass of pytest_distcompat.Driver")
    check_declared(found, name)
    return found


def preload_of(driver: type[Driver], cells: Iterable[Cell]) -> tuple[str, ...]:
    """The modules that runs of that driver need in those cells: what a fork server lacks, every rank imports anew."""
    from pytest_distcompat.drivers._preload import COMPILE
    from pytest_distcompat.models import MODELS
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.runner import WORKER
    from pytest_distcompat.strategies import STRATEGIES

    asked = list(cells)
    models = sorted({str(cell.option("model")) for cell in asked}) if "model" in driver.options else []
    of_models = (module for model in models for module in MODELS.get(model).preload)
    more = COMPILE if any(cell.option("compile") for cell in asked) else ()
    own = (module for registry in (STRATEGIES, PRECISIONS, MODELS, DRIVERS) for module in registry.modules)
    ours = (WORKER, "pytest_distcompat.probe", "pytest_distcompat.probe.snapshot", *own)
    # Not the driver's own module, unless it says so: at import it may ask which rank it is on.
    return tuple(dict.fromkeys((*driver.preload, *of_models, *more, *ours)))
