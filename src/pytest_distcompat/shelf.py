"""A shelf is a package whose every module holds things of one kind; adding a thing is adding one file."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Generic, TypeVar

from pytest_distcompat.failures import UsageProblem

T = TypeVar("T")


class Shelf(Generic[T]):
    """The things of one kind that the modules of a package hold, by name, in the order of ``rank``.

    A module whose name begins with an underscore holds none. The modules import nothing heavy at module level.
    """

    def __init__(self, package: str, kind: type[T], word: str) -> None:
        self._package, self._kind, self._word = package, kind, word

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that hold the things, by their full names."""
        package = importlib.import_module(self._package)
        names = (info.name for info in pkgutil.iter_modules(package.__path__))
        return tuple(f"{self._package}.{name}" for name in names if not name.startswith("_"))

    @functools.cached_property
    def things(self) -> dict[str, T]:
        """Name to thing. Raises TypeError for a module that holds none, or one of a name that there is already."""
        found: dict[str, T] = {}
        for full_name in self.modules:
            module = importlib.import_module(full_name)
            here = [value for value in vars(module).values() if self._belongs(value, module.__name__)]
            if not here:
                raise TypeError(f"{module.__name__} holds no {self._kind.__name__}")
            for thing in here:
                name = getattr(thing, "name")  # noqa: B009 - T is any class with a name
                if found.setdefault(name, thing) is not thing:
                    raise TypeError(f"{module.__name__} holds a second {self._word} named {name!r}")
        return dict(sorted(found.items(), key=lambda pair: (getattr(pair[1], "order", 0), pair[0])))

    def _belongs(self, value: object, module: str) -> bool:
        """An instance of the kind, or a subclass of it that the module itself defines."""
        if isinstance(value, type):
            return issubclass(value, self._kind) and value.__module__ == module
        return isinstance(value, self._kind)

    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self.things)

    def get(self, name: str) -> T:
        """The thing of that name. Raises UsageProblem, listing what there is."""
        try:
            return self.things[name]
        except KeyError:
            known = ", ".join(self.things)
            raise UsageProblem(f"no {self._word} named {name!r}. Known: {known}.") from None
