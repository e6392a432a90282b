"""Environment variables that the parent sets for every process of a launched script, and the path of the probe."""

from __future__ import annotations

import os
from pathlib import Path

#: The directory of the run: logs of the ranks, and ``probe.json``, which says what the probe should record.
RUN = "DISTCOMPAT_RUN"
#: The process that is the rank. A process with another number has inherited the variable and is no rank.
RANK_PID = "DISTCOMPAT_RANK_PID"
#: Set to ``1`` to install the CPU bridge.
ON_CPU = "DISTCOMPAT_ON_CPU"

#: The directory that is put on PYTHONPATH: it holds only ``sitecustomize.py``.
SITE = Path(__file__).parent / "site"


def with_probe(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """Return the environment with the variables that start the probe in every Python process.

    Every process inherits them: through torchrun, accelerate, deepspeed, ``mp.spawn``, shells and ``uv run``.
    """
    own = environment.get("PYTHONPATH")
    path = f"{SITE}{os.pathsep}{own}" if own else str(SITE)
    return {**environment, "PYTHONPATH": path, RUN: str(directory)}
