"""A base class for test launchers that start no process: they are ready at once and have nothing to end."""

from __future__ import annotations


class WithoutProcesses:
    """Every method that a launcher needs, except ``run``."""

    reuse_scope: str = ""

    def warm_up(self) -> None:
        """Do nothing."""

    def get_warm(self) -> str:
        """Return an empty reason: the launcher is warm."""
        return ""

    def retire(self) -> str:
        """Return an empty reason: there are no ranks."""
        return ""

    def close(self) -> None:
        """Do nothing."""
