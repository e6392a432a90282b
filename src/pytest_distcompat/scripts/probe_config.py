"""How much the probe looks at in the ranks of a script: written by the parent, read by each rank."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

_FILE = "probe.json"


@dataclass(frozen=True)
class ProbeConfig:
    """``steps``: so many optimizer steps, from the first, are looked at in full: values, dtypes, collectives, inputs. Of later
    ones only losses and learning rates are written down, so that a long run is not slowed down. 0: the probe stays out, and
    ranks only say how they ended. ``device`` is ``cpu`` or ``cuda``. ``stop_after``: all ranks leave once a checkpoint was
    written after that many steps, as if they had been preempted; 0: they run to their end. ``blocks``: class names of the
    modules that are sharded, recomputed and compiled one by one; if none, those that the model declares.
    """

    steps: int = 5
    device: str = "cpu"
    stop_after: int = 0
    blocks: tuple[str, ...] = ()

    def write(self, directory: Path) -> None:
        """For the ranks of the run in that directory."""
        (directory / _FILE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> ProbeConfig:
        """What the parent wrote."""
        told = json.loads((directory / _FILE).read_text(encoding="utf-8"))
        return cls(**{**told, "blocks": tuple(told["blocks"])})
