"""Loaders of plain torch that keep a state per rank, read for the check ``coverage``.

The driver for torch, the class by which it is tested, calls ``rows`` on each rank. The rows of the
data set are the numbers 0, 1, 2 ..., so that a batch shows which rows it has. Data-parallel ranks
have different rows: ``rank`` and ``ranks`` in this module count only these. Tensor parallel ranks,
which read the same rows, have the same number.

``FilesOfRank`` stands for a data set of files that are streamed: it deals them out to ranks by
itself, so that ranks have unequal numbers of rows, and its state says which files a rank has yet to
read. torchdata's ``StatefulDataLoader`` has such a state of any data set, also in its workers.

Each rank saves the state in a file of its own. ``_rows.TORCH`` says what each loader must do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pytest_distcompat.driver import RESUME_AT
from pytest_distcompat.ext.upstream.drivers._rows import BATCH, BY_RANK, EPOCHS, TORCH_STATEFUL

#: How many rows a file has; the last one may have fewer. Of 23 rows 2 ranks have 3 and 2 files.
ROWS_OF_FILE = 5


class FilesOfRank(IterableDataset[int]):
    """Data set that gives the rows of this rank's files: of 2 ranks each has every second file.

    The order of the files is another one in each epoch.

    Args:
        count: The number of rows of all files.
        rank: Which of the ranks with different rows this is.
        ranks: The number of ranks with different rows.
    """

    def __init__(self, count: int, rank: int, ranks: int) -> None:
        self.files: list[range] = []
        for first in range(0, count, ROWS_OF_FILE):
            self.files.append(range(first, min(first + ROWS_OF_FILE, count)))
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0
        # The epoch in which this rank last read, -1 before the first one.
        self.begun = -1
        # The numbers of the files of that epoch that it has yet to read to their end.
        self.left: list[int] = []
        # How many rows of the first of these files it has given.
        self.given = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order of the files depends."""
        self.epoch = epoch

    def files_of_rank(self) -> list[int]:
        """Return the numbers of the files that this rank, or this worker of it, reads."""
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        order: list[int] = torch.randperm(len(self.files), generator=generator).tolist()
        own = order[self.rank :: self.ranks]
        worker = get_worker_info()
        if worker is None:
            return own
        return own[worker.id :: worker.num_workers]

    def __iter__(self) -> Iterator[int]:
        """Yield the rows that are left of the epoch."""
        if self.begun != self.epoch:
            self.begun = self.epoch
            self.left = self.files_of_rank()
            self.given = 0
        while self.left:
            rows = self.files[self.left[0]]
            while self.given < len(rows):
                self.given += 1
                yield rows[self.given - 1]
            self.left = self.left[1:]
            self.given = 0

    def state_dict(self) -> dict[str, Any]:
        """Return which files and rows are left, and of which epoch."""
        return {"begun": self.begun, "left": self.left, "given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these files."""
        self.begun = state["begun"]
        self.left = state["left"]
        self.given = state["given"]


def rows(
    name: str,
    count: int,
    start: tuple[int, int],
    directory: Path,
    *,
    part: tuple[int, int],
    file: str,
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the epoch and the rows of each batch, such as ``(0, [4, 17])``.

    The run that begins at the start saves the state wherever another run resumes (``RESUME_AT``:
    epoch and batches that were read of it). The others load it.

    Args:
        name: One of ``TORCH_STATEFUL``: ``"StatefulDataLoader, num_workers=2"``.
        count: The number of rows.
        start: Where to begin: an epoch, and how many of its batches were read before.
        directory: The states are saved there.
        part: Which of the ranks with different rows this is, and their number.
        file: The name of this rank's states.
    """

    def state_path(epoch: int, batches: int) -> Path:
        """Return the file of the state after so many batches of an epoch."""
        return directory / f"{name}-{file}-{epoch}-{batches}"

    ordered, loader, stateful = _made(name, count, part)
    first_epoch, done = start
    saves = start == (0, 0)
    if not saves:
        path = state_path(first_epoch, done)
        state = torch.load(path, weights_only=False)
        stateful.load_state_dict(state)
    for epoch in range(first_epoch, EPOCHS):
        ordered.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            yield epoch, batch.tolist()
            if saves and (epoch, number) in RESUME_AT:
                torch.save(stateful.state_dict(), state_path(epoch, number))
        # The end of an epoch is the beginning of the next.
        if saves and (epoch + 1, 0) in RESUME_AT:
            torch.save(stateful.state_dict(), state_path(epoch + 1, 0))


def _made(name: str, count: int, part: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Return three objects: the one with ``set_epoch``, the loader, and the one with a state.

    Args:
        name: One of ``TORCH_STATEFUL``, which maps it to the loader's number of workers.
        count: The number of rows.
        part: Which of the ranks with different rows this is, and their number.
    """
    rank, ranks = part
    data = FilesOfRank(count, rank, ranks)
    if name == BY_RANK:
        return data, DataLoader(data, BATCH), data
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    workers = TORCH_STATEFUL[name]
    if BY_RANK in name:
        loader = StatefulDataLoader(data, BATCH, num_workers=workers)
        return data, loader, loader
    sampler = StatefulDistributedSampler(range(count), ranks, rank)
    loader = StatefulDataLoader(range(count), BATCH, sampler=sampler, num_workers=workers)
    return sampler, loader, loader
