"""What the parent gives to every process of a launched script: variables and the probe's file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_distcompat.decode import decode
from pytest_distcompat.trace import ExtraState

#: The directory of the run: logs of the ranks, and ``probe.json``, which says what the probe should
#: record.
RUN = "DISTCOMPAT_RUN"
#: The process that is the rank. A process with another number has inherited the variable and is no
#: rank.
RANK_PID = "DISTCOMPAT_RANK_PID"
#: Set to ``1`` to install the CPU bridge.
ON_CPU = "DISTCOMPAT_ON_CPU"

#: The directory that is put on PYTHONPATH: it holds only ``sitecustomize.py``.
SITE = Path(__file__).parent / "site"

_PROBE = "probe.json"


def with_probe(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """Return the environment with the variables that start the probe in every Python process."""
    # Every process inherits them: through torchrun, accelerate, deepspeed, ``mp.spawn``, shells and
    # ``uv run``.
    own = environment.get("PYTHONPATH")
    path = str(SITE)
    if own:
        path = f"{SITE}{os.pathsep}{own}"
    return {**environment, "PYTHONPATH": path, RUN: str(directory)}


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of the probe in each rank of a script.

    ``steps`` optimizer steps are recorded in full, of later ones only losses and learning rates;
    with 0 there is no probe. All ranks exit after the checkpoint of step ``stop_after``, as if
    preempted, unless it is 0. ``blocks`` are class names of the modules that are sharded one by
    one; if empty, those that the model declares. ``extra_state`` are variables of the script, and
    what is expected of each.
    """

    steps: int = 5
    device: str = "cpu"
    stop_after: int = 0
    blocks: tuple[str, ...] = ()
    extra_state: Mapping[str, ExtraState] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write the configuration into the directory of a run."""
        text = json.dumps(dataclasses.asdict(self))
        (directory / _PROBE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> ProbeConfig:
        """Read the configuration from the directory of a run."""
        return decode(cls, json.loads((directory / _PROBE).read_text(encoding="utf-8")))
