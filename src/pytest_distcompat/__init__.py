"""pytest-distcompat: does your trainer still train the same model under DDP, FSDP1, FSDP2 and ZeRO, in every precision?

Importing this package imports neither torch nor pytest.
"""

from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.checks import CHECKS, Check, check
from pytest_distcompat.drivers import Driver
from pytest_distcompat.expect import fails, refuses
from pytest_distcompat.failures import DistcompatError, Incompatible, LateFailure, LifeFailure, UsageProblem
from pytest_distcompat.judge import Verdict, judge
from pytest_distcompat.suite import CompatSuite
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
    "LifeFailure",
    "Matrix",
    "Trace",
    "UsageProblem",
    "Verdict",
    "World",
    "check",
    "fails",
    "judge",
    "refuses",
]
__version__ = "0.1.0"
