"""Arguments of ``@pytest.mark.distcompat`` that extensions add.

An extension is a pytest plugin. It returns an ``AddedArgument`` from the hook
``pytest_distcompat_mark_arguments``, as ``AddedArgument("reuse", ("never", "module"))``. A test may
then have ``@pytest.mark.distcompat(world_size=2, reuse="module")``. ``declare.read_mark`` checks
the value, and the extension reads it from ``Mark.added``.

Every session imports this module, so that it imports little.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class AddedArgument:
    """An argument whose value is one of a few words."""

    name: str
    #: The words.
    known: tuple[str, ...]

    @property
    def signature(self) -> str:
        """The argument as ``pytest --markers`` shows it: ``reuse='never'|'module'``."""
        values = "|".join([repr(value) for value in self.known])
        return f"{self.name}={values}"


def added_arguments(config: pytest.Config) -> tuple[AddedArgument, ...]:
    """Return the arguments that all extensions of this pytest add."""
    arguments: list[AddedArgument] = []
    for by_extension in config.hook.pytest_distcompat_mark_arguments():
        arguments += by_extension
    return tuple(arguments)
