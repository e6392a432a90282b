"""A process that leases devices by commands: one a line in, one answer a line out.

``lease COUNT`` -> ``got IDS``, ``release`` -> ``released``, ``fight ROUNDS SEED DIRECTORY`` -> ``fought``. It says ``ready`` first.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from pathlib import Path
from typing import Literal

from pytest_distcompat.lease import Inventory, Pool


def fight(pool: Pool, rounds: int, chance: random.Random, directory: Path) -> None:
    """Lease again and again; for each device a file that nobody else may have made meanwhile."""
    for turn in range(rounds):
        devices = len(pool.inventory.ids)
        count = min(chance.choice((1, 1, 2, devices)), devices)
        with pool.lease(count, who=f"turn {turn}") as lease:
            assert len(lease.ids) == count
            for name in lease.ids:
                os.close(os.open(directory / name, os.O_CREAT | os.O_EXCL))
            for name in lease.ids:
                (directory / name).unlink()


def main(directory: str, timeline: str, who: str, *ids: str) -> None:
    """Do what the standard input says until it ends."""
    kind: Literal["gpu", "cpu"] = "cpu" if ids[0].startswith("cpu") else "gpu"
    pool = Pool(Path(directory), Inventory(kind, ids), timeline=Path(timeline))
    held = contextlib.ExitStack()
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["lease", count]:
                lease = held.enter_context(pool.lease(int(count), who=who))
                print("got", *lease.ids, flush=True)
            case ["release"]:
                held.close()
                print("released", flush=True)
            case ["fight", rounds, seed, arena]:
                fight(pool, int(rounds), random.Random(seed), Path(arena))
                print("fought", flush=True)


main(*sys.argv[1:])
