"""What a driver declares beside model and optimizer, and what its ranks then had of it.

A driver is the trainer under test, as a class with a few methods. It may declare

- data loaders (``Driver.loaders``): a ``Loader`` each. The rows that one gave a rank are a
  ``RowsInfo``, which the check ``coverage`` reads.
- further state of a training (``Driver.extra_state``), such as an average of the weights: an
  ``ExtraState`` each. The values that a rank had are an ``ExtraStateInfo``, which the check
  ``extra_state`` reads.
- functions by which ranks exchange values, such as ``gather`` (``Driver.exchanges``). What a call
  of one gave a rank is an ``ExchangeInfo``, which the check ``exchanges`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Loader:
    """Expectations of a loader of rows that do not divide by the ranks.

    Attributes:
        shuffled: Each epoch has another order.
        filled: The last batches are filled with rows of the beginning, so that all ranks have
            equally many.
        dropped: Rows that fill no batch are left out.
        resumes: It goes on in a fresh process group, from where it was saved.
        midway: If it resumes, it does so in the middle of an epoch too, not only at the beginning.
        moves: It does so with another number of ranks too.
        rows: The number of its rows, if not that of all loaders (``scenario.ROWS``): a data set may
            have fewer than there are ranks.
        reseeded: The name of the loader that it is with another seed, if there is such: its order
            is another.
        turns: How many batches each data parallel rank is given before the ranks load again, if
            those that share its sequences load one each, and all are given them in turn. Then so
            many batches may be filled with rows of the beginning.
    """

    shuffled: bool = True
    filled: bool = True
    dropped: bool = False
    resumes: bool = True
    midway: bool = True
    moves: bool = True
    rows: int = 0
    reseeded: str = ""
    turns: int = 1


class LoadedBatch(NamedTuple):
    """A batch that a loader gave this rank.

    A driver may yield ``(epoch, rows)`` as well, of a loader without a length.

    Attributes:
        epoch: The number of the epoch, from 0.
        rows: The numbers of its rows.
        length: The ``len`` of the loader: how many batches it says that this rank is given in the
            epoch, or in the rest of it where a loader skips what was done. None if it has none, or
            if the trainer's loop skips them, of which the loader knows nothing.
    """

    epoch: int
    rows: Sequence[int]
    length: int | None = None


@dataclass(frozen=True)
class RowsInfo:
    """The rows that one loader gave this rank, from some batch of some epoch on."""

    #: The name of the loader.
    loader: str
    #: The epoch with which it began, from 0.
    epoch: int
    #: How many batches of that epoch were done before.
    done: int
    #: The driver's expectations.
    expected: Loader
    #: For each epoch its batches, each the numbers of its rows: ``(((3, 7), (0, 22)), ...)``.
    epochs: tuple[tuple[tuple[int, ...], ...], ...]
    #: For each epoch the loader's length (``LoadedBatch.length``).
    lengths: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class ExtraState:
    """Expectations of a state beside model and optimizer.

    For example an average of the weights, the place in the data, or a curriculum.

    Attributes:
        changes: It changes within the first three steps.
        alike: All ranks have the same. Shards of a DTensor are compared where ranks hold the same
            part.
        comes_back: A checkpoint brings it back.
        in_reference: The driver has it in ``reference`` too, under the same names, and its tensors
            are the same as there (``parity``).
    """

    changes: bool = True
    alike: bool = True
    comes_back: bool = True
    in_reference: bool = False


@dataclass(frozen=True)
class ExtraStateInfo:
    """Values of one extra state on one rank, by their place in it."""

    #: The attribute of the driver: ``trainer.ema``.
    name: str
    #: The driver's expectations.
    expected: ExtraState
    #: Place in the state -> the text of a number, or the digest of a tensor:
    #: ``{"shadow.inlet.weight": "32:1f...", "step": "3"}``.
    exact: Mapping[str, str]
    #: The same of numbers and tensors with fractions, which computing the same in another order may
    #: change.
    rounded: Mapping[str, str] = field(default_factory=dict)
    #: Place in the state -> the sum of the squares of the tensor there, or of this rank's shard of
    #: it: for a state that the reference has too.
    squares: Mapping[str, float] = field(default_factory=dict)

    @property
    def values(self) -> Mapping[str, str]:
        """Return all values."""
        return {**self.exact, **self.rounded}


@dataclass(frozen=True)
class ExchangeInfo:
    """What one call of an exchange gave a rank. Values are texts: ``int64 (2, 1) [[0], [4]]``."""

    #: The name of the function: ``gather``.
    exchange: str
    #: The name of the value that it was called with: ``bool``.
    value_name: str
    #: That value, as this rank had it.
    value: str
    #: What this rank should get.
    expected: str
    #: What it got; empty if the call raised an error.
    got: str = ""
    #: The error that the call raised: ``TypeError: unsupported dtype``; empty if it raised none.
    error: str = ""
    #: The value after the call, if that changed it and may not; empty otherwise.
    changed: str = ""
