"""Samplers that users write for torch's ``DataLoader``: of rows, and of whole batches.

``Accelerator.prepare`` wraps a loader's sampler, or replaces it, by the class that it has. So the
driver for accelerate tries loaders with samplers of several kinds: ``accelerate_loader`` (module
``_rows``) calls ``sampling("batch_sampler with set_epoch", range(23), 2, drop_last=False)`` for the
arguments of ``DataLoader``. The rows of the data set are the numbers 0, 1, 2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, SequentialSampler


class ShuffledByEpoch(Sampler[int]):
    """Sampler with another order in each epoch, which ``set_epoch`` sets.

    torch's ``DistributedSampler`` does so too.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order depends."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        """Yield the rows in the order of the epoch."""
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        yield from torch.randperm(len(self.rows), generator=generator).tolist()


class ShuffledByGenerator(Sampler[int]):
    """Sampler whose order its generator draws, as torch's ``RandomSampler`` does."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self.generator = torch.Generator()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        """Yield the rows in the order that comes next."""
        yield from torch.randperm(len(self.rows), generator=self.generator).tolist()


class RandomRows(RandomSampler):
    """Subclass of torch's ``RandomSampler`` that changes nothing, as a user's own class is one."""


class Batches(BatchSampler):
    """Subclass of torch's ``BatchSampler`` that changes nothing, as a user's own class is one."""


class BatchesByEpoch(BatchSampler):
    """Sampler of batches: epoch 0 begins with the first batch, epoch 1 with the second."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order depends."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches in the order of the epoch."""
        batches = list(super().__iter__())
        first = self.epoch % len(batches)
        yield from batches[first:]
        yield from batches[:first]


class WholeBatches(Dataset[Any]):
    """Data set that is asked for the rows of a whole batch, and returns the batch."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.count

    def __getitem__(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the batch of these rows."""
        return torch.tensor(rows)


def batches_in_order(count: int, batch_size: int) -> list[torch.Tensor]:
    """Return the batches of so many rows, in order; the last one may have fewer rows."""
    batches = []
    for first in range(0, count, batch_size):
        batches.append(torch.arange(first, min(first + batch_size, count)))
    return batches


#: Way of sampling -> what makes the sampler of rows.
SAMPLERS: dict[str, Callable[[Sequence[int]], Sampler[int]]] = {
    "sampler": ShuffledByEpoch,
    "sampler with a generator": ShuffledByGenerator,
    "RandomSampler": RandomRows,
}
#: Way of sampling -> the sampler of batches, and what makes its sampler of rows.
BATCH_SAMPLERS: dict[str, tuple[type[BatchSampler], Callable[[Sequence[int]], Sampler[int]]]] = {
    "BatchSampler": (Batches, RandomRows),
    "batch_sampler with set_epoch": (BatchesByEpoch, SequentialSampler),
}
#: Way of sampling whole batches, without a batch size -> what makes the sampler of rows.
WHOLE_BATCHES: dict[str, Callable[[Sequence[int]], Sampler[int]]] = {
    "batches": RandomSampler,
    "batches in order": SequentialSampler,
    "batches with set_epoch": ShuffledByEpoch,
}


def sampling(way: str, rows: Sequence[int], batch_size: int, drop_last: bool) -> dict[str, Any]:
    """Return the arguments by which a user makes ``DataLoader`` take rows in an order of their own.

    Args:
        way: A key of ``SAMPLERS``, ``BATCH_SAMPLERS`` or ``WHOLE_BATCHES``.
        rows: The numbers of the rows.
        batch_size: The number of rows of a batch.
        drop_last: Whether a last batch of fewer rows than the others is left out.
    """
    if way in SAMPLERS:
        return {"batch_size": batch_size, "drop_last": drop_last, "sampler": SAMPLERS[way](rows)}
    if way in BATCH_SAMPLERS:
        sampler_class, make_sampler = BATCH_SAMPLERS[way]
        return {"batch_sampler": sampler_class(make_sampler(rows), batch_size, drop_last)}
    sampler = BatchSampler(WHOLE_BATCHES[way](rows), batch_size, drop_last)
    return {"batch_size": None, "sampler": sampler}
