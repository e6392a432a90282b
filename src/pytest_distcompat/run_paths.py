"""Payload of a suite's run: what ranks are to do, and the directories in which they read and write.

A run is one process group from start to end, on which each rank performs the same actions (build,
step, save, ...). ``runner`` in pytest's process writes a ``SuitePayload`` into the request of the
run; ``worker`` on each rank decodes it. A run that resumes has another directory than the run whose
checkpoint it loads: ``load_from`` is in the earlier one.
"""

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

    Attributes:
        driver: The name of the driver (the trainer under test as a class), or
            ``module:attribute``.
        cell: The id of the cell in which the run trains, ``fsdp2-fp32-w2``.
        ranks: The number of data-parallel ranks of ``asking_cell``. A reference run, which repeats
            the training in one process, trains on the batches of so many ranks.
        device: ``cuda`` or ``cpu``.
        run: The actions of the ranks.
        save_to: The directory of the checkpoint that the run saves. If the run corrupts a
            checkpoint, it is a copy of ``load_from``, which the run then loads.
        load_from: The directory of the checkpoint that the run loads.
        export: The directory of the exported model.
        log_level: The log level of pytest; empty if none is set.
        own_disks: Whether each machine has these directories on a disk of its own, so that a rank
            does not see what a rank of another machine writes.
        asking_cell: The id of the cell whose check needs the run. The run itself may train in
            another cell: the reference of ``fsdp2-fp32-w2`` trains in ``ddp-fp32-w1``.
        recorders: Functions of extensions that record on each rank (``recording``), by import path:
            ``my_extension:recorder``.
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
        """The directories of the run."""
        return RunPaths(
            save_to=Path(self.save_to),
            load_from=Path(self.load_from),
            export=Path(self.export),
            ranks=self.ranks,
        )

    @property
    def driver_cell(self) -> Cell:
        """The driver's cell: in a reference run with the number of ranks for which it stands."""
        # A loss that divides by the number of ranks must do so in the reference's one process too.
        cell = Cell.parse(self.cell)
        if not self.run.is_reference:
            return cell
        return dataclasses.replace(cell, world_size=self.ranks)


@dataclass(frozen=True)
class RunPaths:
    """The directories of a run, and the data-parallel ranks for which a reference run stands.

    Attributes:
        save_to: See ``SuitePayload``.
        load_from: The directory of the checkpoint of an earlier run, or of this one.
        export: See ``SuitePayload``.
        ranks: See ``SuitePayload``.
    """

    save_to: Path
    load_from: Path
    export: Path
    ranks: int

    def clear(self, run: Run, directory: Path, *, first: bool) -> None:
        """Restore the directories to their state before the run.

        ``worker`` calls it on each rank of a run that a user repeats by hand, because a trainer may
        refuse to overwrite the checkpoint of the first try. The checkpoint that the run loads stays
        as it is.

        Args:
            run: The run.
            directory: A directory for a file that tells other ranks that the directories are
                restored.
            first: Whether this is the rank that restores them. The others wait for it.
        """
        # Each launch has an id of its own, so the file of an earlier launch does not count.
        cleared = directory / f"cleared-{os.environ['TORCHELASTIC_RUN_ID']}"
        if first:
            if self.save_to.is_file():
                self.save_to.unlink()
            shutil.rmtree(self.save_to, ignore_errors=True)
            if "export" in run.actions:
                shutil.rmtree(self.export, ignore_errors=True)
            if run.damage and run.after:
                # The run corrupts this copy of the checkpoint of the run ``after``.
                shutil.copytree(self.load_from, self.save_to)
            self.save_to.mkdir(parents=True, exist_ok=True)
            cleared.touch()
        # This waits forever if the first rank fails, but then torchrun ends all ranks.
        while not cleared.exists():
            clock.sleep(0.02)
