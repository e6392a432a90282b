"""Compatibility tests for distributed trainers: DDP, FSDP1, FSDP2 and ZeRO, in every precision.

PYTEST_DONT_REWRITE: checks raise messages of their own, and the fork server imports the package
before pytest could rewrite it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.lazy import lazily

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell, Matrix
    from pytest_distcompat.checks import CHECKS, Check, check
    from pytest_distcompat.compat_suite import CompatSuite
    from pytest_distcompat.drivers import Driver
    from pytest_distcompat.engine import check_driver
    from pytest_distcompat.expect import fails, refuses
    from pytest_distcompat.failures import (
        DistcompatError,
        Incompatible,
        LateFailure,
        RunFailedError,
        UsageProblem,
    )
    from pytest_distcompat.status import Verdict
    from pytest_distcompat.trace import Trace
    from pytest_distcompat.world import World

__all__ = [
    "CHECKS",
    "Cell",
    "Check",
    "CompatSuite",
    "DistcompatError",
    "Driver",
    "Incompatible",
    "LateFailure",
    "Matrix",
    "RunFailedError",
    "Trace",
    "UsageProblem",
    "Verdict",
    "World",
    "check",
    "check_driver",
    "fails",
    "refuses",
]
__version__ = "0.1.0"

# Public name -> the module that has it, which is imported when the name is first used. Every pytest
# session imports this package to find the plugin, and few use it.
_HOME = {
    **dict.fromkeys(("Cell", "Matrix"), "cell"),
    **dict.fromkeys(("CHECKS", "Check", "check"), "checks"),
    **dict.fromkeys(("fails", "refuses"), "expect"),
    **dict.fromkeys(
        ("DistcompatError", "Incompatible", "LateFailure", "RunFailedError", "UsageProblem"),
        "failures",
    ),
    "CompatSuite": "compat_suite",
    "Driver": "drivers",
    "check_driver": "engine",
    "Trace": "trace",
    "Verdict": "status",
    "World": "world",
}
__getattr__ = lazily(__name__, _HOME)
