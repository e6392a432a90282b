"""Base of test launchers that start no process: ready at once, with nothing to end."""

from __future__ import annotations


class WithoutProcesses:
    """All that a launcher must be able to do, but for ``run``."""

    reuse_scope: str = ""

    def warm_up(self) -> None:
        """Nothing."""

    def get_warm(self) -> str:
        """It is."""
        return ""

    def retire(self) -> str:
        """Nobody waits."""
        return ""

    def close(self) -> None:
        """Nothing."""
