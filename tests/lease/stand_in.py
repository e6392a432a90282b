"""A pytest plugin for runs on made-up GPUs: ``-p stand_in``. There are 8, and no process is started for ranks.

``script.json`` in the current directory says of a test, by its name after the last ``::``, for how many seconds its ranks
live (``seconds``), how many runs have to be there at the same time (``meets``), and how many MiB stay in use on their first GPU
(``leaks``); without a word it is nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_distcompat import devices
from pytest_distcompat.launch.forensics.ending import Ending, RankEnd
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.torchrun import LAUNCHERS
from pytest_distcompat.lease import pool
from pytest_distcompat.plugin.marked.phase import Phase

GPUS = tuple(f"GPU-{number}" for number in range(8))
#: Bytes in use on each, as long as this process lives.
used = dict.fromkeys(GPUS, 1 << 30)


def script() -> dict[str, dict[str, float]]:
    path = Path("script.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def first_visible(environment: Mapping[str, str]) -> str:
    return GPUS[int(environment["CUDA_VISIBLE_DEVICES"].partition(",")[0])]


def meet(runs: float) -> None:
    """Wait until runs of so many processes are here."""
    if runs:
        Path(f"here-{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while len(list(Path().glob("here-*"))) < runs:
        assert time.monotonic() < deadline, "nobody came"
        time.sleep(0.01)


class Ranks:
    """Stands for a launcher: every run ends well, after its time."""

    can_open = False

    def __init__(self, warmth: Warmth, *, device: str) -> None:
        assert device == "cuda"

    def warm_up(self) -> None:
        pass

    def get_warm(self) -> str:
        return ""

    def run(self, request: Request) -> Ending:
        item = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
        state = script().get(item.rpartition("::")[2], {})
        time.sleep(state.get("seconds", 0.0))
        meet(state.get("meets", 0))
        used[first_visible(request.set)] += int(state.get("leaks", 0)) << 20
        phases = [Phase(when, "passed") for when in ("setup", "call", "teardown")]
        ranks = range(request.world_size)
        return Ending(
            tuple(RankEnd(rank, "done") for rank in ranks), dict.fromkeys(ranks, phases), command="torchrun ..."
        )

    def close(self) -> None:
        pass


def used_memory(ids: Sequence[str]) -> dict[str, int]:
    return {name: used[name] for name in ids}


devices.gpu_uuids = lambda: list(GPUS)
devices.used_memory = used_memory
devices.own_memory = used_memory
# What is made up comes back at once or never.
assert pool.Pool.__init__.__kwdefaults__ is not None
pool.Pool.__init__.__kwdefaults__["free_timeout"] = 0.0
LAUNCHERS["warm"] = Ranks  # type: ignore[assignment]
