"""pytest plugin of walks: one walk of each built-in driver in the default profile, and a summary.

A *walk* is a sequence of calls of a live trainer that is compared with one process (``claim``).
pytest loads this by the entry point ``distcompat-walk``; the core of the plugin calls the two
hooks. The first adds a *cell* (strategy, precision, number of ranks) with the check ``walk`` to a
suite, the second returns lines for the end of the terminal's report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.compat_suite import CompatSuite
    from pytest_distcompat.plugin.session import DistcompatSession
    from pytest_distcompat.profiles import AddedCheck
    from pytest_distcompat.report.document import Report

#: Built-in driver -> the strategy under which every read-only call is made: the one that has most
#: of them.
_STRATEGY_BY_DRIVER = {
    "torch": "fsdp2",
    "accelerate": "fsdp2",
    "trainer": "fsdp2",
    "deepspeed": "zero3",
}


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_added_checks(
    suite: type[CompatSuite], session: DistcompatSession
) -> list[AddedCheck]:
    """Have every read-only call made in one cell of each built-in suite.

    Returns:
        The cell with its check; nothing for other suites, other profiles, and GPUs.
    """
    is_built_in = suite.__module__ == "pytest_distcompat.ext.upstream.suites"
    # On GPUs it was not tried. A substitute is what an extension has in the place of ranks.
    tried_here = session.device == "cpu" and session.substitute is None
    if not is_built_in or not tried_here or session.setting("profile").value != "default":
        return []
    from pytest_distcompat.cell import Cell

    # The check ``walk`` with one walk, which has every read-only call.
    from pytest_distcompat.ext.walk.check import OBSERVERS_WALK
    from pytest_distcompat.profiles import AddedCheck

    cell = Cell.of(_STRATEGY_BY_DRIVER[suite.driver], "fp32", session.world_size, model="mlp")
    return [AddedCheck(cell, OBSERVERS_WALK)]


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_summary(report: Report) -> list[str]:
    """Say how to draw the same walks again."""
    lines: list[str] = []
    for verdict in report.results:
        if verdict.check == "walk" and verdict.seed is not None:
            walked = f"--driver {verdict.driver} --cell {verdict.cell}"
            command = f"distcompat walk {walked} --seed {verdict.seed}"
            lines.append(f"walks drawn by seed {verdict.seed}, again: {command}")
    return lines
