"""Where the ranks of a suite's run read and write."""

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
    """The directories of one run, and for how many ranks a reference stands."""

    save_to: Path
    #: What an earlier run saved, or this one.
    load_from: Path
    export: Path
    ranks: int

    @classmethod
    def told(cls, payload: Mapping[str, Any]) -> RunPaths:
        """As the request has them."""
        save_to, load_from, export = (Path(payload[name]) for name in ("save_to", "load_from", "export"))
        return cls(save_to, load_from, export, payload["ranks"])

    def clear(self, run: Run, rank: int, directory: Path) -> None:
        """As they were before the run: for ranks that somebody starts again by hand, before any of them does a thing.

        A trainer may refuse to write over a checkpoint, and old files would be taken for new ones. What the run goes on
        from stays: if that was saved by hand, it is what was saved by hand.
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
