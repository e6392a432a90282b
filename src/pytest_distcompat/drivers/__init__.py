"""Registry of drivers, the trainers under test. The built-in ones are those of ``ext.upstream``.

A driver is a subclass of ``Driver`` by which a trainer is tested. A suite names it by its name,
``accelerate``, or as ``module:attribute``, ``my_trainer.testing:Driver``. pytest calls
``find_driver(name)`` when it collects a suite, and each rank calls it again; pytest then calls
``preload_of`` for the modules that the fork server, from which ranks are forked, imports for all of
them. Other packages add drivers by the entry point group ``pytest_distcompat.drivers``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers._declared import check_declared, unsupported_reason
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.lazy import lazily
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.missing_module import hint_of
from pytest_distcompat.registry import Registry

if TYPE_CHECKING:
    from pytest_distcompat.drivers.tiny import TinyDriver

#: The registered drivers by name: ``torch``, ``accelerate``, ``deepspeed``, ``trainer``.
DRIVERS: Registry[type[Driver]] = Registry(
    __name__,
    Driver,  # type: ignore[arg-type]  # holds the classes themselves
    "driver",
    has_modules=False,
)

__all__ = [
    "DRIVERS",
    "Calls",
    "Driver",
    "TinyDriver",
    "find_driver",
    "preload_of",
    "unsupported_reason",
]


#: For cells that compile: torch.compile imports most of itself when it first compiles, seconds of
#: each rank.
_COMPILER_MODULES = (
    # torch._dynamo imports pytest, if it is installed, to trace its context managers.
    "pytest",
    "torch._dynamo.backends.debugging",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.export._trace",
)
# ``TinyDriver``, the base of the drivers of ``ext.upstream``, is imported when it is first used:
# that extension imports this module.
__getattr__ = lazily(__name__, {"TinyDriver": "tiny"})


def find_driver(name: str) -> type[Driver]:
    """Return the driver of that name, or the class behind ``module:attribute``.

    Raises:
        UsageProblem: If there is none, or if it is invalid.
    """
    module_name, colon, attribute = name.partition(":")
    if name and not colon:
        return DRIVERS.get(name)
    # An absolute name: a relative one would be of this package.
    parts = [*module_name.split("."), attribute]
    if not all(part.isidentifier() for part in parts):
        raise UsageProblem(
            f"driver {name!r}: expected module:attribute, or one of {', '.join(DRIVERS.names())}"
        )
    try:
        driver = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        problem = f"driver {name!r}: {error}"
        hint = _hint(error, module_name)
        if hint:
            problem = f"{problem}; {hint}"
        raise UsageProblem(problem) from error
    except (ImportError, AttributeError) as error:
        raise UsageProblem(f"driver {name!r}: {error}") from error
    except KeyboardInterrupt:
        # The user's Ctrl-C, which the last clause would turn into a problem of the driver.
        raise
    except SystemExit as error:
        raise UsageProblem(
            f"driver {name!r}: {module_name} exits when it is imported, with {error.code!r}"
        ) from error
    except BaseException as error:  # a module may raise anything when it is imported
        raise UsageProblem(
            f"driver {name!r}: {type(error).__name__} when it is imported: {error}"
        ) from error
    if not (isinstance(driver, type) and issubclass(driver, Driver)):
        raise UsageProblem(
            f"driver {name!r} is {driver!r}; expected a subclass of pytest_distcompat.Driver"
        )
    check_declared(driver, name)
    return driver


def _hint(error: ModuleNotFoundError, module_name: str) -> str:
    """Return what may help against a module missing at the import of a driver's module.

    An empty text if nothing is known. The missing module may be the driver's own or another.

    Args:
        error: The error of the import.
        module_name: The driver's module: ``my_trainer.testing``.
    """
    hint = hint_of(error, Path.cwd())
    package = module_name.partition(".")[0]
    if not hint and error.name == package:
        return "install it, or have pytest find it: pythonpath = DIRECTORY in its settings"
    return hint


def preload_of(driver: type[Driver], cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the modules that the fork server should import for that driver and those cells.

    They are the full names of what ranks would import otherwise, each for itself.
    """
    from pytest_distcompat.models import MODELS, model_of
    from pytest_distcompat.precisions import PRECISIONS
    from pytest_distcompat.runner import WORKER
    from pytest_distcompat.strategies import STRATEGIES

    preload_by_model: dict[str, tuple[str, ...]] = {}
    compiles = False
    for cell in cells:
        if cell.option("compile"):
            compiles = True
        if "model" in driver.options:
            model = model_of(cell)
            preload_by_model[model.name] = model.preload
    modules = list(driver.preload)
    for name in sorted(preload_by_model):
        modules += preload_by_model[name]
    if compiles:
        modules += _COMPILER_MODULES
    modules.append(WORKER)
    modules += [f"pytest_distcompat.probe.{name}" for name in ("files", "observe", "snapshot")]
    # Not the driver's own module, unless it lists itself: at import it may read its rank from the
    # environment.
    for registry in (STRATEGIES, PRECISIONS, MODELS, DRIVERS):
        modules += registry.modules
    return tuple(dict.fromkeys(modules))
