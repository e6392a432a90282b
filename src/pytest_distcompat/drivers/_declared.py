"""Validation of what a driver's class declares.

A driver is the class by which a trainer is tested; users write their own. Its class attributes say
what it supports, as ``options = ("model", "tp")`` and ``portable = {"fsdp1": "fsdp2"}``. A wrong
name or type would silently leave test items out. So ``drivers.find_driver`` calls
``check_declared`` for each driver that it loads. ``unsupported_reason`` is how the rest of the
plugin asks a driver why it cannot run a cell, one configuration under test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.strategies import STRATEGIES

#: The attributes that are tuples of names.
_TUPLES_OF_NAMES = ("preload", "options", "libraries", "reshards", "blocks", "ignored_modules")
#: Those of them that are read on a driver object, which has its cell: a property may compute them.
#: The others are read on the class, before there is an object.
_MAY_BE_PROPERTIES = ("blocks", "ignored_modules")


def check_declared(driver: type[Driver], name: str) -> None:
    """Validate the attributes of a driver's class.

    Args:
        driver: The class.
        name: What messages call it: the name in the suite, ``my_trainer.testing:Driver``.

    Raises:
        UsageProblem: If one is wrong; the message has the valid values.
    """
    for attribute in _TUPLES_OF_NAMES:
        _check_names(driver, name, attribute)
    if not isinstance(driver.portable, Mapping):
        raise UsageProblem(
            f"driver {name!r}: portable is {driver.portable!r:.200}; "
            "expected a mapping of strategy to strategy"
        )
    if not isinstance(
        inspect.getattr_static(driver, "unsupported_reason"), (classmethod, staticmethod)
    ):
        # Called on the class, a plain method would take the cell for ``self``.
        raise UsageProblem(
            f"driver {name!r}: unsupported_reason is no classmethod; "
            "expected unsupported_reason(cls, cell, device)"
        )
    for option in driver.options:
        if option not in OPTIONS:
            raise UsageProblem(
                f"driver {name!r}: options: no option named {option!r}. Known: {', '.join(OPTIONS)}"
            )
    _check_strategies(name, "reshards", driver.reshards)
    _check_strategies(name, "portable", driver.portable.keys())
    _check_strategies(name, "portable", driver.portable.values())


def _check_names(driver: type[Driver], name: str, attribute: str) -> None:
    """Raise UsageProblem unless the attribute is a tuple or list of texts, or may be a property."""
    value: Any = getattr(driver, attribute)
    # It is known only of an object, which a rank makes.
    if isinstance(value, property):
        if attribute in _MAY_BE_PROPERTIES:
            return
        raise UsageProblem(
            f"driver {name!r}: {attribute} is a property; expected a tuple of names, "
            "which is read on the class"
        )
    has_names = False
    if isinstance(value, (tuple, list)):
        has_names = all(isinstance(item, str) for item in value)
    if not has_names:
        raise UsageProblem(
            f"driver {name!r}: {attribute} is {value!r:.200}; expected a tuple of names"
        )


def _check_strategies(name: str, attribute: str, strategies: Iterable[str]) -> None:
    """Raise UsageProblem if the attribute names a strategy that there is not."""
    for strategy in strategies:
        try:
            STRATEGIES.get(strategy)
        except UsageProblem as problem:
            raise UsageProblem(f"driver {name!r}: {attribute}: {problem}") from None


def unsupported_reason(driver: type[Driver], cell: Cell, device: str) -> str | None:
    """Return why the driver cannot run the cell on that device; None if it can.

    Raises:
        UsageProblem: If the driver's method raises or returns something else.
    """
    name = f"{driver.__module__}:{driver.__qualname__}"
    call = f"driver '{name}': unsupported_reason({cell.id}, {device!r})"
    method: Callable[[Cell, str], Any] = driver.unsupported_reason
    try:
        reason = method(cell, device)
    except Exception as error:
        kind = type(error).__name__
        raise UsageProblem(f"{call} raised {kind}: {error}") from error
    if reason is not None and not isinstance(reason, str):
        raise UsageProblem(
            f"{call} returned {reason!r:.200}; "
            "expected the reason as one sentence, None if the driver supports the cell"
        )
    # An empty text is no reason.
    return reason or None
