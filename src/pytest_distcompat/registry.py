"""Registries: packages whose modules each hold items of one kind, so that one more file adds one more item."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Generic, TypeVar

from pytest_distcompat.failures import UsageProblem

T = TypeVar("T")


class Registry(Generic[T]):
    """The items of one kind that the modules of a package define, by name, in the order of their ``order``.

    Modules whose name begins with an underscore are left out. The modules import nothing heavy at module level.

    Args:
        package: The full name of the package.
        kind: The class of the items: an item is an instance of it, or a subclass that a module defines.
        item_name: What error messages call an item.
    """

    def __init__(self, package: str, kind: type[T], item_name: str) -> None:
        self._package, self._kind, self._item_name = package, kind, item_name

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the full names of the modules that define the items."""
        package = importlib.import_module(self._package)
        names = (info.name for info in pkgutil.iter_modules(package.__path__))
        return tuple(f"{self._package}.{name}" for name in names if not name.startswith("_"))

    @functools.cached_property
    def by_name(self) -> dict[str, T]:
        """Return each item under its name.

        Raises:
            TypeError: If a module defines no item, or one whose name is taken.
        """
        found: dict[str, T] = {}
        for full_name in self.modules:
            module = importlib.import_module(full_name)
            here = [value for value in vars(module).values() if self._belongs(value, module.__name__)]
            if not here:
                raise TypeError(f"{module.__name__} holds no {self._kind.__name__}")
            for item in here:
                name = getattr(item, "name")  # noqa: B009 - T is any class with a name
                if found.setdefault(name, item) is not item:
                    raise TypeError(f"{module.__name__} holds a second {self._item_name} named {name!r}")
        return dict(sorted(found.items(), key=lambda pair: (getattr(pair[1], "order", 0), pair[0])))

    def _belongs(self, value: object, module: str) -> bool:
        """Tell whether the value is an instance of the kind, or a subclass of it that the module itself defines."""
        if isinstance(value, type):
            return issubclass(value, self._kind) and value.__module__ == module
        return isinstance(value, self._kind)

    def names(self) -> tuple[str, ...]:
        """Return all names, in order."""
        return tuple(self.by_name)

    def get(self, name: str) -> T:
        """Return the item of that name.

        Raises:
            UsageProblem: If there is none; the message lists the names.
        """
        try:
            return self.by_name[name]
        except KeyError:
            known = ", ".join(self.by_name)
            raise UsageProblem(f"no {self._item_name} named {name!r}. Known: {known}.") from None
