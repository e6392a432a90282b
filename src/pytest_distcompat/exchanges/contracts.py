"""Contracts of exchanges: with which values they are called, and what each rank should get.

An ``Exchange`` of a driver, a function such as ``gather``, names one. The values of all ranks are
generated. So each rank knows those of all others, and computes what it should get without any
communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pytest_distcompat.exchanges.nested import map_tensors
from pytest_distcompat.exchanges.values import (
    ALL_DTYPES,
    FLOATING,
    INTEGER,
    Numbers,
    Values,
    containers,
    counted,
    extremes,
    lists,
    mean_of,
    shared,
    summable,
    tensors,
    uneven,
    uneven_lists,
)


class Contract(Protocol):
    """The values that a function is called with, and what each rank should get."""

    def values(self, ranks: int) -> Values:
        """Return name of a value -> what makes it for a rank.

        Args:
            ranks: The number of ranks.
        """
        raise NotImplementedError

    def expected(self, values: Sequence[Any], rank: int) -> Any:
        """Return what a rank should get.

        Args:
            values: The value of each rank.
            rank: The rank.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Gathers:
    """Each rank gets the rows of all ranks, in the order of the ranks.

    A scalar counts as one row.

    Attributes:
        containers: Whether the function also takes dicts, lists and tuples of tensors.
        dtypes: The names of the dtypes that it takes.
    """

    containers: bool = True
    dtypes: tuple[str, ...] = ALL_DTYPES

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any contract has it
        """Return tensors of all dtypes and shapes, alone and in containers."""
        return _tensors(self.dtypes, in_containers=self.containers)

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return the rows of all ranks."""
        import torch

        def joined(parts: list[Any]) -> Any:
            if not parts[0].ndim:
                return torch.stack(parts)
            return torch.cat(parts)

        return map_tensors(values, joined)


def _tensors(dtypes: tuple[str, ...], *, in_containers: bool) -> Values:
    """Return tensors of these dtypes, in containers too if the function takes those."""
    values = dict(tensors(dtypes))
    if dtypes == ALL_DTYPES:
        values.update(extremes())
    if in_containers:
        values.update(containers())
    return values


@dataclass(frozen=True)
class GathersLists:
    """Each rank gets one list with what is in the lists of all ranks, in the order of the ranks."""

    def values(self, ranks: int) -> Values:
        """Return lists of what can be pickled."""
        return {**lists(), **uneven_lists(ranks)}

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return all in one list."""
        joined: list[Any] = []
        for value in values:
            joined += value
        return joined


@dataclass(frozen=True)
class Reduces:
    """Each rank gets the sum, mean or largest of the ranks' tensors, in their dtype.

    Attributes:
        operation: What is computed.
        containers: Whether the function also takes dicts, lists and tuples of tensors.
        dtypes: The names of the dtypes that it takes. A mean is never taken of integers.
    """

    operation: Literal["sum", "mean", "max"]
    containers: bool = True
    dtypes: tuple[str, ...] = (*FLOATING, *INTEGER)

    def __post_init__(self) -> None:
        """Refuse an operation that is none of the three."""
        if self.operation not in {"sum", "mean", "max"}:
            raise ValueError(f"operation {self.operation!r}: expected sum, mean or max")

    def values(self, ranks: int) -> Values:
        """Return tensors whose sums and means are exact, alone and in containers."""
        numbers: Numbers = summable
        dtypes = self.dtypes
        if self.operation == "mean":
            numbers = mean_of(ranks)
            dtypes = tuple(dtype for dtype in dtypes if dtype in FLOATING)
        values = dict(tensors(dtypes, numbers))
        if self.containers:
            values.update(containers(numbers))
        return values

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return the reduced tensors."""
        import torch

        def reduced(parts: list[Any]) -> Any:
            stacked = torch.stack(parts)
            if self.operation == "max":
                return stacked.amax(0)
            total = stacked.sum(0)
            if self.operation == "mean":
                total = total / len(parts)
            return total.to(stacked.dtype)

        return map_tensors(values, reduced)


@dataclass(frozen=True)
class Broadcasts:
    """Each rank gets what one rank has.

    Attributes:
        source: That rank; -1 is the last one.
        containers: Whether the function also takes dicts, lists and tuples of tensors.
        dtypes: The names of the dtypes that it takes.
    """

    source: int = 0
    containers: bool = True
    dtypes: tuple[str, ...] = ALL_DTYPES

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any contract has it
        """Return tensors of all dtypes and shapes, alone and in containers."""
        return _tensors(self.dtypes, in_containers=self.containers)

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return the value of that rank."""
        return values[self.source]


@dataclass(frozen=True)
class BroadcastsLists:
    """Each rank gets the list of one rank. The lists of all ranks are equally long.

    Attributes:
        source: That rank; -1 is the last one.
    """

    source: int = 0

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any contract has it
        """Return lists of what can be pickled."""
        return lists()

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return the list of that rank."""
        return values[self.source]


@dataclass(frozen=True)
class Pads:
    """Each rank gets its own tensor, padded to the length of the longest, in its dtype.

    Attributes:
        dim: The dimension along which it is padded.
        padding: The number that it is padded with.
        first: Whether padding stands before the elements. By default it stands after them.
    """

    dim: int = 0
    padding: float = 0
    first: bool = False

    def values(self, ranks: int) -> Values:
        """Return tensors of uneven lengths, in the dtypes that have the number."""
        import torch

        dtypes: list[str] = []
        for dtype in ALL_DTYPES:
            padding = torch.tensor(self.padding, dtype=torch.float64).to(getattr(torch, dtype))
            if float(padding) == self.padding:
                dtypes.append(dtype)
        return uneven(self.dim, ranks, tuple(dtypes))

    def expected(self, values: Sequence[Any], rank: int) -> Any:
        """Return the padded tensors."""
        import torch

        def padded(parts: list[Any]) -> Any:
            own = parts[rank]
            shape = list(own.shape)
            shape[self.dim] = max(part.shape[self.dim] for part in parts) - own.shape[self.dim]
            padding = torch.full(shape, self.padding).to(own.dtype)
            if self.first:
                return torch.cat([padding, own], self.dim)
            return torch.cat([own, padding], self.dim)

        return map_tensors(values, padded)


@dataclass(frozen=True)
class Fills:
    """Each rank gets its own rows and the last one again, until they divide by the ranks.

    Attributes:
        dim: The dimension of the rows.
    """

    dim: int = 0

    def values(self, ranks: int) -> Values:
        """Return tensors of few and many rows, some of which divide by the ranks."""
        return counted(self.dim, ranks)

    def expected(self, values: Sequence[Any], rank: int) -> Any:
        """Return the rows of the rank, and what fills them up."""
        import torch

        def filled(parts: list[Any]) -> Any:
            own = parts[rank]
            rows = own.shape[self.dim]
            lacking = -rows % len(parts)
            last = own.narrow(self.dim, rows - 1, 1)
            return torch.cat([own, *[last] * lacking], self.dim)

        return map_tensors(values, filled)


@dataclass(frozen=True)
class Splits:
    """Each rank gets its part of what all ranks have: parts are in order, the first ones larger.

    Attributes:
        padded: Whether shorter parts are filled with the last element of all.
    """

    padded: bool = False

    def values(self, ranks: int) -> Values:
        """Return lists, tuples, tensors and dicts of them, the same on all ranks."""
        return shared(ranks)

    def expected(self, values: Sequence[Any], rank: int) -> Any:
        """Return the part of the rank."""
        whole = values[rank]
        if isinstance(whole, dict):
            return {key: self._part(value, rank, len(values)) for key, value in whole.items()}
        return self._part(whole, rank, len(values))

    def _part(self, whole: Any, rank: int, ranks: int) -> Any:
        """Return the part of a list, tuple or tensor."""
        size, larger = divmod(len(whole), ranks)
        start = rank * size + min(rank, larger)
        length = size + (rank < larger)
        part = whole[start : start + length]
        lacking = math.ceil(len(whole) / ranks) - length
        if self.padded and lacking:
            return _joined(part, whole[-1:], lacking)
        return part


def _joined(part: Any, last: Any, times: int) -> Any:
    """Return a part with the last element of all after it, so many times."""
    if hasattr(part, "dtype"):
        import torch

        return torch.cat([part, *[last] * times])
    return part + last * times


@dataclass(frozen=True)
class OnRank:
    """A function runs on one rank alone, and that rank gets what it returns; others get None.

    Attributes:
        rank: The rank; -1 is the last one. If there is no such rank, all get None.
    """

    rank: int = 0

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any contract has it
        """Return a number, which the function is to return."""
        return {"a number": lambda rank: rank + 1}

    def expected(self, values: Sequence[Any], rank: int) -> Any:
        """Return the rank's value, or None."""
        if rank in {self.rank, self.rank + len(values)}:
            return values[rank]
        return None


@dataclass(frozen=True)
class AnyRank:
    """Each rank gets True if the value of any rank is True, else False: a bool of Python."""

    def values(self, ranks: int) -> Values:
        """Return True for one rank, and for none or all of them."""
        return {
            "rank 0": lambda rank: rank == 0,
            "the last rank": lambda rank: rank == ranks - 1,
            # After it, as one that stays set would show.
            "no rank": lambda _rank: False,
            "all ranks": lambda _rank: True,
        }

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return whether any is."""
        return any(values)
