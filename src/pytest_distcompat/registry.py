"""Registries: items of one kind that a package's modules define, or other packages add.

Strategies, precisions and checks are found in this way: to add one is to add a module with an item
to the package, ``strategies/fsdp2.py`` with a ``Strategy`` named ``fsdp2``.
Another installed package adds one by an entry point (a line in its metadata that names an object).
Models and drivers come from entry points alone, also those of this package's own extensions.

Each kind has one ``Registry``, ``STRATEGIES`` say. ``STRATEGIES.get("fsdp2")`` is how all other
code finds the item behind a name that a user wrote. Nothing is imported before a name is needed
(``by_name``).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Generic, TypeVar

from pytest_distcompat.failures import UsageProblem, hides_frames

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames

T = TypeVar("T")


@functools.cache
def installed_entry_points() -> Any:
    """Return the entry points of all installed packages, to be selected from.

    To read them takes some 20 ms.
    """
    return entry_points()


class Registry(Generic[T]):
    """The items of one kind that the modules of a package define, by name.

    They are sorted by their attribute ``order``, then by name. An item has an attribute ``name``.
    It is an instance of ``kind``, such as a ``Strategy``, or a subclass of it that a module
    defines, such as a driver.

    Other installed packages, and extensions, add items by entry points: their group is the
    package's name, as ``pytest_distcompat.strategies``, their value ``module:item``, or ``module``
    for all items of a module.
    """

    def __init__(
        self,
        package: str,
        kind: type[T],
        item_name: str,
        *,
        has_modules: bool = True,
        group: str = "",
    ) -> None:
        """Look for nothing yet.

        Args:
            package: The full name of the package: ``pytest_distcompat.strategies``.
            kind: The class of the items.
            item_name: A noun for an item in messages: ``strategy``.
            has_modules: Whether modules of the package define items. Modules whose name begins with
                an underscore are left out. If not, all items come from entry points.
            group: The group of entry points, if it is not named after the package.
        """
        self._package = package
        self._group = group or package
        self._kind = kind
        self._item_name = item_name
        self._has_modules = has_modules

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the full names of the modules that define the items."""
        modules = self._own_modules()
        modules += [entry.module for entry in self.extensions.values()]
        return tuple(dict.fromkeys(modules))

    def _own_modules(self) -> list[str]:
        """Return the full names of the package's modules that define items."""
        if not self._has_modules:
            return []
        package = importlib.import_module(self._package)
        modules: list[str] = []
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                modules.append(f"{self._package}.{info.name}")
        return modules

    @property
    def extensions(self) -> dict[str, EntryPoint]:
        """Return the entry points by which other packages add items, by "NAME of DISTRIBUTION".

        Extensions of this package are among them.
        """
        entry_by_origin: dict[str, EntryPoint] = {}
        for entry in installed_entry_points().select(group=self._group):
            distribution = entry.dist.name if entry.dist else "an unknown package"
            entry_by_origin[f"{entry.name} of {distribution}"] = entry
        return entry_by_origin

    def _own_items(self) -> Iterator[tuple[str, T]]:
        """Yield each item of the package: the module that defines it, and the item."""
        for full_name in self._own_modules():
            module = importlib.import_module(full_name)
            items = self._items_of(module)
            if not items:
                raise TypeError(f"{module.__name__} holds no {self._kind.__name__}")
            for item in items:
                yield module.__name__, item

    def _items_of(self, module: ModuleType) -> list[T]:
        """Return the items that a module defines."""
        items: list[T] = []
        for value in vars(module).values():
            if self._belongs(value, module.__name__):
                items.append(value)
        return items

    def _added_items(self) -> Iterator[tuple[str, T]]:
        """Yield each item that another package adds: words for its origin, and the item."""
        for origin, entry in self.extensions.items():
            where = f"entry point {self._group}: {origin}"
            try:
                item = entry.load()
            except Exception as error:
                kind = type(error).__name__
                raise UsageProblem(f"{where}: {kind}: {error}") from error
            if isinstance(item, ModuleType) and self._items_of(item):
                # An entry point may name a whole module.
                for item_of_module in self._items_of(item):
                    yield where, item_of_module
                continue
            if not self._belongs(item, getattr(item, "__module__", "")):
                raise UsageProblem(f"{where} is {item!r:.200}; expected a {self._kind.__name__}")
            yield where, item

    @functools.cached_property
    def by_name(self) -> dict[str, T]:
        """Return each item under its name.

        Raises TypeError if a module of the package defines no item, or one whose name is taken;
        UsageProblem for an entry point.
        """
        items: dict[str, T] = {}
        for module, item in self._own_items():
            name = _name(item)
            # A module may import the item of another one: that is the same item, and no error.
            if items.setdefault(name, item) is not item:
                raise TypeError(f"{module} holds a second {self._item_name} named {name!r}")
        for where, item in self._added_items():
            name = _name(item)
            if items.setdefault(name, item) is not item:
                raise UsageProblem(f"{where} holds a second {self._item_name} named {name!r}")

        def position(name: str) -> tuple[int, str]:
            order: int = getattr(items[name], "order", 0)
            return order, name

        return {name: items[name] for name in sorted(items, key=position)}

    def _belongs(self, value: object, module: str) -> bool:
        """Tell whether a value in a module is an item: an instance of the kind, or a subclass.

        A subclass must be defined by the module itself: modules import base classes too.
        """
        if isinstance(value, type):
            return issubclass(value, self._kind) and value.__module__ == module
        return isinstance(value, self._kind)

    def names(self) -> tuple[str, ...]:
        """Return all names, in order."""
        return tuple(self.by_name)

    def get(self, name: str) -> T:
        """Return the item of that name. Raises UsageProblem, with the names, if there is none."""
        try:
            return self.by_name[name]
        except KeyError:
            known = ", ".join(self.by_name) or "none"
            raise UsageProblem(f"no {self._item_name} named {name!r}. Known: {known}.") from None


def _name(item: object) -> str:
    """Return the attribute ``name`` of an item."""
    return str(getattr(item, "name"))  # noqa: B009 - the items are of any class with a name
