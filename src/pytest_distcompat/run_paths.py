"""The payload of a suite's run for its ranks, and the directories in which they read and write."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.scenario import Run


@dataclass(frozen=True)
class SuitePayload:
    """The payload of the request for one run of a suite.

    ``driver`` is a name or ``module:attribute``, ``cell`` the id of the run's cell, ``ranks`` the number of
    data-parallel ranks of the cell that it is for. A run with damage has a copy of ``load_from`` in ``save_to``, and
    loads that. ``log_level`` is pytest's, or empty. With ``own_disks`` the three directories are other ones on each machine.
    ``recorders`` are the extensions' on each rank (``recording``); ``asking_cell`` is the cell whose check needs the run.
    """

    driver: str
    cell: str
    ranks: int
    device: str
    run: Run
    save_to: str
    load_from: str
    export: str
    log_level: str = ""
    own_disks: bool = False
    asking_cell: str = ""
    recorders: tuple[str, ...] = ()

    @property
    def paths(self) -> RunPaths:
        """The directories that it names."""
        return RunPaths(Path(self.save_to), Path(self.load_from), Path(self.export), self.ranks)

    @property
    def driver_cell(self) -> Cell:
        """Return the cell that the driver is given: in a reference run one with as many ranks as the run it stands for."""
        # A loss that divides by the number of ranks is to compute in one process what it computes on a rank.
        cell = Cell.parse(self.cell)
        return dataclasses.replace(cell, world_size=self.ranks) if self.run.is_reference else cell


@dataclass(frozen=True)
class RunPaths:
    """Directories of one run, and the number of data-parallel ranks that a reference run stands for."""

    save_to: Path
    #: The checkpoint of an earlier run, or of this one.
    load_from: Path
    export: Path
    ranks: int

    def clear(self, run: Run, directory: Path, *, first: bool) -> None:
        """Restore the directories to their state before the run, for ranks that are started again by hand."""
        # A trainer may refuse to overwrite a checkpoint. The one that the run loads stays as it is.
        cleared = directory / f"cleared-{os.environ['TORCHELASTIC_RUN_ID']}"
        if first:
            if self.save_to.is_file():
                self.save_to.unlink()
            shutil.rmtree(self.save_to, ignore_errors=True)
            if "export" in run.actions:
                shutil.rmtree(self.export, ignore_errors=True)
            if run.damage and run.after:
                shutil.copytree(self.load_from, self.save_to)
            self.save_to.mkdir(parents=True, exist_ok=True)
            cleared.touch()
        # If the first rank fails, torchrun ends the others.
        while not cleared.exists():
            clock.sleep(0.02)
