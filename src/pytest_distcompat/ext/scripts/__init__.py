"""Launches of unmodified scripts and command lines on ranks.

Environment variables alone put the probe into them.

In the parent ``launching`` makes the command line and runs it by ``launch.hosting``. In the ranks
``site/sitecustomize.py`` starts the probe. Every Python process of a script imports this package,
so its modules are loaded on first use only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.lazy import lazily

if TYPE_CHECKING:
    from pytest_distcompat.ext.scripts.configuration import write_configuration
    from pytest_distcompat.ext.scripts.launching import launch
    from pytest_distcompat.ext.scripts.rank_parity import Parity, parity
    from pytest_distcompat.ext.scripts.result import ScriptRun
    from pytest_distcompat.ext.scripts.roundtrip import RoundTrip, resume_roundtrip

__all__ = [
    "Parity",
    "RoundTrip",
    "ScriptRun",
    "launch",
    "parity",
    "resume_roundtrip",
    "write_configuration",
]

_HOME = {
    "Parity": "rank_parity",
    "RoundTrip": "roundtrip",
    "ScriptRun": "result",
    "launch": "launching",
    "parity": "rank_parity",
    "resume_roundtrip": "roundtrip",
    "write_configuration": "configuration",
}
__getattr__ = lazily(__name__, _HOME)
