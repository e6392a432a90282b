"""Laws of exchanges: with which values they are called, and what each rank should get.

An ``Exchange`` of a driver, a function such as ``gather``, names one. The values of all ranks are
generated. So each rank knows those of all others, and computes what it should get without any
communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_distcompat.exchanges.nested import combined
from pytest_distcompat.exchanges.values import (
    ALL_DTYPES,
    FLOATING,
    WHOLE,
    Values,
    lists,
    nested,
    shared,
    tensors,
    uneven,
)


class Law(Protocol):
    """What an exchange should give."""

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

    A tensor without a dimension counts as one row.

    Attributes:
        containers: Whether it is called with dicts, lists and tuples of tensors too.
    """

    containers: bool = True

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any law has it
        """Return tensors of all dtypes and shapes, alone and in containers."""
        if self.containers:
            return {**tensors(), **nested()}
        return tensors()

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return the rows of all ranks."""
        import torch

        def joined(parts: list[Any]) -> Any:
            if not parts[0].ndim:
                return torch.stack(parts)
            return torch.cat(parts)

        return combined(values, joined)


@dataclass(frozen=True)
class GathersLists:
    """Each rank gets one list with what is in the lists of all ranks, in the order of the ranks."""

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any law has it
        """Return lists of what can be pickled."""
        return lists()

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
        operation: ``sum``, ``mean`` or ``max``. A mean is taken of numbers with fractions alone.
        containers: Whether it is called with dicts, lists and tuples of tensors too.
    """

    operation: str
    containers: bool = True

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any law has it
        """Return tensors, alone and in containers."""
        dtypes: tuple[str, ...] = (*FLOATING, *WHOLE)
        if self.operation == "mean":
            dtypes = FLOATING
        if self.containers:
            return {**tensors(dtypes), **nested()}
        return tensors(dtypes)

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

        return combined(values, reduced)


@dataclass(frozen=True)
class Broadcasts:
    """Each rank gets what one rank has.

    Attributes:
        source: That rank; -1 is the last one.
        containers: Whether it is called with dicts, lists and tuples of tensors too.
        dtypes: The names of the dtypes that it is called with.
    """

    source: int = 0
    containers: bool = True
    dtypes: tuple[str, ...] = ALL_DTYPES

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any law has it
        """Return tensors, alone and in containers."""
        if self.containers:
            return {**tensors(self.dtypes), **nested()}
        return tensors(self.dtypes)

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return the value of that rank."""
        return values[self.source]


@dataclass(frozen=True)
class BroadcastsLists:
    """Each rank gets the list of one rank, in its own list, which is as long.

    Attributes:
        source: That rank; -1 is the last one.
    """

    source: int = 0

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any law has it
        """Return lists of what can be pickled, of the same length on all ranks."""
        values = dict(lists())
        del values["as many as the rank"]
        return values

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return the list of that rank."""
        return values[self.source]


@dataclass(frozen=True)
class Pads:
    """Each rank gets its own tensor, as long as the longest, in its dtype.

    Attributes:
        dim: The dimension along which it is padded.
        padding: The number that it is padded with.
        first: Whether padding stands before the elements. By default it stands after them.
    """

    dim: int = 0
    padding: int = 0
    first: bool = False

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any law has it
        """Return tensors of uneven lengths, in the dtypes that have the number."""
        if self.padding < 0:
            return uneven(self.dim, (*FLOATING, "int64", "int32"))
        return uneven(self.dim, ALL_DTYPES)

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

        return combined(values, padded)


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
        """Return the part of a list, tuple, text or tensor."""
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
        rank: The rank; -1 is the last one.
    """

    rank: int = 0

    def values(self, ranks: int) -> Values:  # noqa: ARG002 - as any law has it
        """Return a number, which the function is to return."""
        return {"a number": lambda rank: rank + 1}

    def expected(self, values: Sequence[Any], rank: int) -> Any:
        """Return the rank's value, or None."""
        if rank == self.rank % len(values):
            return values[rank]
        return None


@dataclass(frozen=True)
class AnyRank:
    """Each rank gets True if the value of any rank is True."""

    def values(self, ranks: int) -> Values:
        """Return True for one rank, and for none or all of them."""
        return {
            "the last rank": lambda rank: rank == ranks - 1,
            # After it, as one that stays set would show.
            "no rank": lambda _rank: False,
            "all ranks": lambda _rank: True,
        }

    def expected(self, values: Sequence[Any], rank: int) -> Any:  # noqa: ARG002 - alike on all ranks
        """Return whether any is."""
        return any(values)
