"""A process that leases devices by commands: one a line in, one answer a line out.

``lease COUNT`` -> ``got IDS``, ``release`` -> ``released``, ``fight ROUNDS SEED DIRECTORY`` -> ``fought``. It says ``ready`` first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
from pathlib import Path
from typing import Literal

from pytest_distcompat.lease import Inventory, Pool

#: How many runs of one rank may use a GPU in a fight, where runs share it.
PLACES = 2


def occupy(directory: Path, device: str, places: int) -> list[Path]:
    """Make a file for each place, which nobody else may have made meanwhile."""
    made: list[Path] = []
    for number in range(PLACES):
        path = directory / f"{device}-{number}"
        if len(made) < places:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
                made.append(path)
    assert len(made) == places, f"{device}: {len(made)} of {places} places"
    return made


def fight(pool: Pool, rounds: int, chance: random.Random, directory: Path) -> None:
    """Lease again and again; for each place of a device a file that nobody else may have made meanwhile."""
    places = 1 if pool.inventory.runs_share else PLACES
    for turn in range(rounds):
        devices = len(pool.inventory.ids)
        count = min(chance.choice((1, 1, 2, devices)), devices)
        with pool.lease(count, who=f"turn {turn}") as lease:
            assert len(lease.ids) == count
            made = [occupy(directory, name, places) for name in lease.ids]
            for path in itertools.chain(*made):
                path.unlink()


def main(directory: str, timeline: str, who: str, places: str, *ids: str) -> None:
    """Do what the standard input says until it ends."""
    kind: Literal["gpu", "cpu"] = "cpu" if ids[0].startswith("cpu") else "gpu"
    inventory = Inventory(kind, ids, int(places), runs_share=int(places) > 1)
    pool = Pool(Path(directory), inventory, timeline=Path(timeline))
    leases = contextlib.ExitStack()
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["lease", count]:
                lease = leases.enter_context(pool.lease(int(count), who=who))
                print("got", *lease.ids, flush=True)
            case ["release"]:
                leases.close()
                print("released", flush=True)
            case ["fight", rounds, seed, arena]:
                fight(pool, int(rounds), random.Random(seed), Path(arena))
                print("fought", flush=True)


main(*sys.argv[1:])
