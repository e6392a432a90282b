"""Launches of unmodified scripts and command lines on ranks.

These are the names of ``ext.scripts`` that users import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_distcompat.ext.scripts import (
        Parity,
        RoundTrip,
        ScriptRun,
        launch,
        parity,
        resume_roundtrip,
        write_configuration,
    )

__all__ = [
    "Parity",
    "RoundTrip",
    "ScriptRun",
    "launch",
    "parity",
    "resume_roundtrip",
    "write_configuration",
]


def __getattr__(name: str) -> Any:
    """Return a public name of the extension, whose modules are loaded on first use."""
    from pytest_distcompat.ext import scripts

    return getattr(scripts, name)
