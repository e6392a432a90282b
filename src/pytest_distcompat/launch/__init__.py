"""Launching of ranks: starts them, waits for them, ends them, and reports how they ended.

Knows neither strategies nor checks nor pytest.

``request`` and ``ending`` are plain data; ``warm`` and ``cold`` are the two launchers of the parent, the second on
``hosting``, which watches any foreign launcher; ``server``,
``agent`` and ``preload`` run in the launcher process and in the fork servers; ``rank`` is the main of every rank.
"""

from pytest_distcompat.launch.cold import TorchrunLauncher
from pytest_distcompat.launch.ending import Ending, RankEnd
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.rank_log import RankLog
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.reused_ranks import Reuse
from pytest_distcompat.launch.warm import WarmLauncher

LAUNCHERS: dict[str, type[WarmLauncher] | type[TorchrunLauncher]] = {
    "warm": WarmLauncher,
    "torchrun": TorchrunLauncher,
}

__all__ = [
    "LAUNCHERS",
    "Ending",
    "Launcher",
    "RankEnd",
    "RankLog",
    "Request",
    "Reuse",
    "TorchrunLauncher",
    "WarmLauncher",
    "Warmth",
]
