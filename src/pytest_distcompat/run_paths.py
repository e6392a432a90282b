"""Directories in which the ranks of a run read and write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.scenario import Run


@dataclass(frozen=True)
class RunPaths:
    """Directories of one run, and the number of ranks that a reference run stands for."""

    save_to: Path
    #: The checkpoint of an earlier run, or of this one.
    load_from: Path
    export: Path
    ranks: int

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> RunPaths:
        """Return the directories that a request names."""
        save_to, load_from, export = (Path(payload[name]) for name in ("save_to", "load_from", "export"))
        return cls(save_to, load_from, export, payload["ranks"])

    def clear(self, run: Run, rank: int, directory: Path) -> None:
        """Restore the directories to their state before the run, for ranks that are started again by hand.

        A trainer may refuse to overwrite a checkpoint, and old files would be taken for new ones. The checkpoint that the
        run loads stays as it is.
        """
        cleared = directory / f"cleared-{os.environ['TORCHELASTIC_RUN_ID']}"
        if rank == 0:
            shutil.rmtree(self.save_to)
            if "export" in run.actions:
                shutil.rmtree(self.export, ignore_errors=True)
            if run.damage:
                shutil.copytree(self.load_from, self.save_to)
            self.save_to.mkdir(exist_ok=True)
            cleared.touch()
        # If rank 0 fails, torchrun ends the others.
        while not cleared.exists():
            clock.sleep(0.02)
