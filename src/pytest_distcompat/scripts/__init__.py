"""Runs unmodified scripts and command lines on ranks, with the probe put into them by the environment alone.

``command`` says how a launcher is called, ``hosting`` runs it and says how it ended, ``launching`` puts both together;
``hosted_rank``, ``instrumentation``, ``recorder`` and ``bridge`` run in the ranks, let in by ``site/sitecustomize.py``.

Every Python process of a launched script imports this package: what it holds is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.lazy import lazily

if TYPE_CHECKING:
    from pytest_distcompat.scripts.configuration import write_configuration
    from pytest_distcompat.scripts.launching import launch
    from pytest_distcompat.scripts.result import ScriptRun
    from pytest_distcompat.scripts.roundtrip import RoundTrip, resume_roundtrip

__all__ = ["RoundTrip", "ScriptRun", "launch", "resume_roundtrip", "write_configuration"]

_HOME = {
    "RoundTrip": "roundtrip",
    "ScriptRun": "result",
    "launch": "launching",
    "resume_roundtrip": "roundtrip",
    "write_configuration": "configuration",
}
__getattr__ = lazily(__name__, _HOME)
