"""The environment variables by which the parent speaks to every process of a launched script, and where the probe lies."""

from __future__ import annotations

import os
from pathlib import Path

#: The directory of the run: logs of the ranks, and ``probe.json``, which says what the probe is to look at.
RUN = "DISTCOMPAT_RUN"
#: The process that is the rank; who inherits it is a child of a rank, and none itself.
RANK_PID = "DISTCOMPAT_RANK_PID"
#: Set to ``1`` where ranks on the CPU are to run what accelerate and transformers run on GPUs only.
ON_CPU = "DISTCOMPAT_ON_CPU"

#: The directory that is put on PYTHONPATH: it holds nothing but ``sitecustomize.py``.
SITE = Path(__file__).parent / "site"


def with_probe(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """That environment with the probe in it.

    By PYTHONPATH and ``sitecustomize``, since that goes wherever the environment goes: through torchrun, accelerate,
    deepspeed, ``mp.spawn``, shells and ``uv run``. A ``.pth`` file is read in directories of packages only, and would
    have to be written into the environment of the user.
    """
    before = environment.get("PYTHONPATH")
    path = f"{SITE}{os.pathsep}{before}" if before else str(SITE)
    return {**environment, "PYTHONPATH": path, RUN: str(directory)}
