"""Launching of ranks: starts them, waits for them, ends them, and reports how they ended.

Knows neither strategies nor checks nor pytest.

``request`` and ``ending`` are plain data; ``warm`` is the launcher of the parent, and ``hosting`` watches any foreign launcher,
torchrun's command among them; ``server``, ``agent`` and ``preload`` run in the launcher process and in the fork servers;
``rank`` is the main of every rank.

Ranks of scripts import this package too, perhaps in an environment without psutil, so its modules are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.lazy import lazily

if TYPE_CHECKING:
    from pytest_distcompat.launch.ending import Ending, RankEnd
    from pytest_distcompat.launch.hosting import LAUNCHERS, TorchrunLauncher
    from pytest_distcompat.launch.launcher import Launcher
    from pytest_distcompat.launch.rank_log import RankLog
    from pytest_distcompat.launch.request import Request, Warmth
    from pytest_distcompat.launch.reused_ranks import Reuse
    from pytest_distcompat.launch.warm import WarmLauncher

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

_HOME = {
    **dict.fromkeys(("LAUNCHERS", "TorchrunLauncher"), "hosting"),
    **dict.fromkeys(("Ending", "RankEnd"), "ending"),
    **dict.fromkeys(("Request", "Warmth"), "request"),
    "Launcher": "launcher",
    "RankLog": "rank_log",
    "Reuse": "reused_ranks",
    "WarmLauncher": "warm",
}
__getattr__ = lazily(__name__, _HOME)
