"""What the parent gives to every process of a launched script: variables and the probe's file.

The parent (``launching``) starts the script with ``with_probe(os.environ, directory)`` as its
environment, and writes ``ProbeConfig(...)`` to ``probe.json`` in that directory. Every Python
process of the script then runs ``site/sitecustomize.py`` when it starts, because Python imports a
module of that name from PYTHONPATH. That starts the *probe*, the code that records what the script
trains, and the probe reads ``probe.json``. A *rank* is one of the processes that train together;
the script may start others too.
"""

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
#: The pid of the process that is a rank, which sets it itself. A process with another pid has
#: inherited the variable from its parent and is no rank.
RANK_PID = "DISTCOMPAT_RANK_PID"
#: Set to ``1`` to install the CPU bridge, by which accelerate runs FSDP without a GPU.
ON_CPU = "DISTCOMPAT_ON_CPU"

#: The directory that is put on PYTHONPATH: it holds only ``sitecustomize.py``.
SITE = Path(__file__).parent / "site"

#: The file with a ``ProbeConfig``.
_PROBE = "probe.json"


def with_probe(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """Return the environment with the variables that start the probe in every Python process."""
    # Every process inherits them: through torchrun, accelerate, deepspeed, ``mp.spawn``, shells and
    # ``uv run``. The user's own PYTHONPATH stays, behind ours.
    own = environment.get("PYTHONPATH")
    path = str(SITE)
    if own:
        path = f"{SITE}{os.pathsep}{own}"
    return {**environment, "PYTHONPATH": path, RUN: str(directory)}


@dataclass(frozen=True)
class ProbeConfig:
    """Settings of the probe in each rank of a script."""

    #: How many optimizer steps are recorded in full. Of later ones only losses and learning rates
    #: are recorded. With 0 there is no probe.
    steps: int = 5
    #: ``cpu`` or ``cuda``.
    device: str = "cpu"
    #: All ranks exit after the checkpoint of this step, as if preempted, unless it is 0.
    stop_after: int = 0
    #: Class names of the modules that are sharded one by one, such as ``("LlamaDecoderLayer",)``;
    #: if empty, those that the model declares.
    blocks: tuple[str, ...] = ()
    #: Name of a variable of the script, such as ``trainer.ema`` -> what is expected of its state.
    extra_state: Mapping[str, ExtraState] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write the configuration into the directory of a run."""
        text = json.dumps(dataclasses.asdict(self))
        (directory / _PROBE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> ProbeConfig:
        """Read the configuration from the directory of a run."""
        return decode(cls, json.loads((directory / _PROBE).read_text(encoding="utf-8")))
