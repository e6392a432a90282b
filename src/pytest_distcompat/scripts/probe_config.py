"""Configuration of the probe in the ranks of a script: written by the parent, read by each rank."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

_FILE = "probe.json"


@dataclass(frozen=True)
class ProbeConfig:
    """What the probe records in each rank of a script.

    Attributes:
        steps: How many optimizer steps are recorded in full. Of later ones only losses and learning rates are recorded,
            so that a long run is not slowed down. With 0 there is no probe, and ranks only log how they ended.
        device: ``cpu`` or ``cuda``.
        stop_after: All ranks exit after the checkpoint of that step, as if preempted. With 0 they run to their end.
        blocks: Class names of the modules that are sharded one by one; if empty, those that the model declares.
    """

    steps: int = 5
    device: str = "cpu"
    stop_after: int = 0
    blocks: tuple[str, ...] = ()

    def write(self, directory: Path) -> None:
        """Write the configuration into the directory of a run."""
        (directory / _FILE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> ProbeConfig:
        """Read the configuration from the directory of a run."""
        fields = json.loads((directory / _FILE).read_text(encoding="utf-8"))
        return cls(**{**fields, "blocks": tuple(fields["blocks"])})
