"""Arguments of ``@pytest.mark.distcompat`` that extensions add.

Every session imports this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class AddedArgument:
    """An argument whose value is one of a few words."""

    name: str
    known: tuple[str, ...]

    @property
    def signature(self) -> str:
        """The argument as the description of the mark shows it."""
        values = "|".join([repr(value) for value in self.known])
        return f"{self.name}={values}"


def added_arguments(config: pytest.Config) -> tuple[AddedArgument, ...]:
    """Return the arguments that the extensions of a pytest add."""
    arguments: list[AddedArgument] = []
    for by_extension in config.hook.pytest_distcompat_mark_arguments():
        arguments += by_extension
    return tuple(arguments)
