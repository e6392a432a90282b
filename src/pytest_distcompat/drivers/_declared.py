"""What a driver's class says of itself, read before any rank starts: a wrong word is said where it stands.

``options = "compile"`` is a text whose letters are taken for names, and ``reshards = ("fspd2",)`` claims nothing: both would
leave items out without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.strategies import STRATEGIES

#: The attributes that hold names.
_NAMES = ("preload", "options", "libraries", "reshards", "blocks", "ignored_modules")


def check_declared(driver: type[Driver], name: str) -> None:
    """Raise UsageProblem, with the right words, for an attribute of the class that is wrong."""
    for attribute in _NAMES:
        value: Any = getattr(driver, attribute)
        if isinstance(value, property):
            continue
        if not isinstance(value, (tuple, list)) or not all(isinstance(one, str) for one in value):
            raise UsageProblem(f"driver {name!r}: {attribute} is {value!r:.200}; expected a tuple of names")
    if not isinstance(driver.portable, Mapping):
        raise UsageProblem(
            f"driver {name!r}: portable is {driver.portable!r:.200}; expected a mapping of strategy to strategy"
        )
    if not isinstance(inspect.getattr_static(driver, "unsupported_reason"), (classmethod, staticmethod)):
        # It would take the cell for itself.
        raise UsageProblem(f"driver {name!r}: unable is no classmethod; expected unsupported_reason(cls, cell, device)")
    for option in driver.options:
        if option not in OPTIONS:
            raise UsageProblem(f"driver {name!r}: options: no option named {option!r}. Known: {', '.join(OPTIONS)}")
    strategies = {"reshards": driver.reshards, "portable": (*driver.portable, *driver.portable.values())}
    for attribute, named in strategies.items():
        for strategy in named:
            try:
                STRATEGIES.get(strategy)
            except UsageProblem as problem:
                raise UsageProblem(f"driver {name!r}: {attribute}: {problem}") from None


def unsupported_reason(driver: type[Driver], cell: Cell, device: str) -> str | None:
    """Return why the driver cannot run the cell on that device, as its own ``unsupported_reason`` says; None if it can.

    Raises:
        UsageProblem: If the driver's method raises, or returns something else than a text or None.
    """
    asked = f"driver '{driver.__module__}:{driver.__qualname__}': unsupported_reason({cell.id}, {device!r})"
    ask: Callable[[Cell, str], Any] = driver.unsupported_reason
    try:
        found = ask(cell, device)
    except Exception as error:
        raise UsageProblem(f"{asked} raised {type(error).__name__}: {error}") from error
    if found is not None and not isinstance(found, str):
        raise UsageProblem(
            f"{asked} returned {found!r:.200}; expected the reason as one sentence, None if the driver supports the cell"
        )
    return found or None
