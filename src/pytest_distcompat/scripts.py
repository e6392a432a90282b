"""Launches of unmodified scripts and command lines on ranks: names that users import.

``from pytest_distcompat import scripts`` gives a user's test ``scripts.launch("train.py", ...)``,
which runs a training script on several ranks, observes it, and checks what it did. The code is in
the extension ``ext.scripts``. In an installation without that folder this import still works, and
the use of a name raises ImportError.
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
