"""The check ``walk``, which runs walks in a cell: what one walk shows decides which one runs next.

A *walk* is a sequence of calls of a live trainer, such as ``step(), save(), step()``, compared with
one process that makes the same calls. A *check* of a suite is a claim about a *cell* (strategy,
precision, number of ranks) of a *driver*, the class that builds and calls a trainer. Most checks
say beforehand which runs they need. This one cannot, since walks are drawn at random and shrunk, so
it overrides ``execute``, which the runner of suites calls. An ``Explorer`` draws walks, runs them
and shrinks those that fail. An ``Execution`` has the recorded runs of the failing walks, none if
all is well; from these the claim ``walk`` yields its findings.

``WALK`` is the check of the profile ``walk`` (``profile``), ``OBSERVERS_WALK`` that of the default
profile (``plugin``).
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Check, Execution
from pytest_distcompat.driver import Driver
from pytest_distcompat.ext.walk.claim import walk
from pytest_distcompat.ext.walk.explore import WALKS, Explorer
from pytest_distcompat.runner import Runner
from pytest_distcompat.scenario import TRAIN


def why_not_walked(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why there are no walks of a driver in a cell; None if there are."""
    if driver.live_calls is None:
        return "the driver declares no calls"
    if cell.option("model") != "mlp":
        return "walks freeze and add layers of the model mlp"
    return None


@dataclass(frozen=True)
class WalkCheck(Check):
    """The check of profile ``walk``: its runs are sequences of calls that are drawn at random."""

    def execute(
        self,
        runner: Runner,
        name: str,
        driver: type[Driver],  # noqa: ARG002
        cell: Cell,
    ) -> Execution:
        """Replay walks that failed once, make every read-only call, then draw.

        Returns:
            The runs of the walks that failed, on which the claim then finds what is wrong.
        """
        explorer = Explorer(runner, name, cell)
        seed = explorer.seed
        return Execution(explorer.explore(WALKS, seed), seed=seed)


@dataclass(frozen=True)
class ObserversCheck(Check):
    """The same check for the default profile, in which its only walk makes every read-only call."""

    def execute(
        self,
        runner: Runner,
        name: str,
        driver: type[Driver],  # noqa: ARG002
        cell: Cell,
    ) -> Execution:
        """Make every read-only call that is not known to fail."""
        explorer = Explorer(runner, name, cell)
        # ``may_pass``: calls that are known to fail are left out, so none of these need fail.
        return Execution(explorer.observe(), may_pass=True)


# The scenario TRAIN is not run: it only says how many ranks the runs have.
#: The check of the profile ``walk``.
WALK = WalkCheck("walk", TRAIN, until=(), claim=walk, order=95, not_applicable=why_not_walked)
#: The check of the default profile, with the same id.
OBSERVERS_WALK = ObserversCheck(
    "walk", TRAIN, until=(), claim=walk, order=95, not_applicable=why_not_walked
)
