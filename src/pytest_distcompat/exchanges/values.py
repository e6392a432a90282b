"""Values that ranks exchange: tensors of many dtypes and shapes, and lists and dicts.

A *contract* (``contracts``) calls these functions for the values of each rank. Each returns the
name of a value -> a function that makes it for a rank. torch is imported when a value is made:
pytest's process imports the contracts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

#: Makes a value for a rank.
OfRank = Callable[[int], Any]
#: Name of a value -> what makes it.
Values = Mapping[str, OfRank]
#: Called with a rank and the numbers of the elements of its tensor, from 0: returns the elements.
Numbers = Callable[[int, "torch.Tensor"], "torch.Tensor"]

#: The names of dtypes, as torch has them.
FLOATING = ("float32", "bfloat16", "float16", "float64")
INTEGER = ("int64", "int32", "uint8")
ALL_DTYPES = (*FLOATING, *INTEGER, "bool")

#: The name of the value that requires a gradient, which nothing may change in place.
REQUIRES_GRAD = "requires_grad"


class Pair(NamedTuple):
    """A named tuple, as models return it."""

    loss: Any
    logits: Any


def distinct(rank: int, index: torch.Tensor) -> torch.Tensor:
    """Return elements that differ from one another, and from those of the next ranks."""
    return (index + 1 + 2 * rank) % 64


def summable(rank: int, index: torch.Tensor) -> torch.Tensor:
    """Return elements 0, 1 or 2, of which each rank has the largest somewhere.

    Sums of up to 64 ranks are exact in each dtype, in any order: bfloat16 has whole numbers up to
    256, and uint8 ends at 255.
    """
    return (2 * rank + index) % 3


def mean_of(ranks: int) -> Numbers:
    """Return elements whose mean is exact: each is divisible by the number of ranks.

    So is it in any order, and whether parts are divided before or after they are added. It is on up
    to 10 ranks, and on 16, 32 and 64.
    """
    return lambda rank, index: summable(rank, index) * ranks


def tensors(dtypes: tuple[str, ...] = ALL_DTYPES, numbers: Numbers = distinct) -> Values:
    """Return tensors of two rows and three columns in each dtype, and other shapes in the first.

    Args:
        dtypes: The names of the dtypes.
        numbers: What the elements are.
    """

    def of_shape(shape: tuple[int, ...], dtype: str) -> OfRank:
        return lambda rank: _tensor(rank, shape, dtype, numbers)

    made: dict[str, OfRank] = {}
    for dtype in dtypes:
        made[dtype] = of_shape((2, 3), dtype)
    first = dtypes[0]
    made["scalar"] = of_shape((), first)
    made["one element"] = of_shape((1,), first)
    made["empty"] = of_shape((0, 3), first)
    made["three dimensions"] = of_shape((2, 1, 2), first)
    made["not contiguous"] = lambda rank: _tensor(rank, (2, 3), first, numbers).t()
    if first in FLOATING:
        # ``calls`` lets it require a gradient once it is on the device: before, it were no leaf.
        made[REQUIRES_GRAD] = of_shape((3,), first)
    return made


def containers(numbers: Numbers = distinct) -> Values:
    """Return lists, tuples and dicts of tensors in float32, with these elements."""

    def tensor(rank: int, *shape: int) -> torch.Tensor:
        return _tensor(rank, shape, "float32", numbers)

    return {
        "list": lambda rank: [tensor(rank, 1), tensor(rank, 2, 1)],
        "tuple": lambda rank: (tensor(rank, 2),),
        "named tuple": lambda rank: Pair(tensor(rank, 1), tensor(rank, 1, 2)),
        # A key that is no name cannot be a keyword.
        "dict in a list": lambda rank: [{"x": tensor(rank, 1), 0: tensor(rank, 2)}],
    }


def extremes() -> Values:
    """Return tensors that a detour by another dtype would change."""
    import torch

    return {
        "large integers": lambda rank: torch.tensor([2**53 + 1 + rank, -1]),
        "fractions": lambda rank: torch.tensor([1 / 3 + rank, -1e-30, math.inf, math.nan]),
    }


def uneven(dim: int, ranks: int, dtypes: tuple[str, ...] = ALL_DTYPES) -> Values:
    """Return tensors of two dimensions that have another length on each rank along one of them.

    Args:
        dim: That dimension; negative ones count from the end.
        ranks: The number of ranks.
        dtypes: The names of the dtypes.
    """

    def of_length(dtype: str, length: Callable[[int], int]) -> OfRank:
        def make(rank: int) -> Any:
            shape = [2, 2]
            shape[dim] = length(rank)
            return _tensor(rank, tuple(shape), dtype, distinct)

        return make

    made: dict[str, OfRank] = {}
    for dtype in dtypes:
        made[dtype] = of_length(dtype, lambda rank: rank + 1)
    first = dtypes[0]
    made["longest on rank 0"] = of_length(first, lambda rank: ranks - rank)
    made["empty on rank 0"] = of_length(first, lambda rank: rank)
    made["empty on the last rank"] = of_length(first, lambda rank: ranks - 1 - rank)
    made["equally long"] = of_length(first, lambda _rank: 2)
    made["dict"] = lambda rank: {"x": made[first](rank), "y": made["longest on rank 0"](rank)}
    return made


def counted(dim: int, ranks: int) -> Values:
    """Return tensors of two dimensions that have few and many rows; some divide by the ranks.

    Args:
        dim: The dimension of the rows.
        ranks: The number of ranks.
    """

    def of_rows(count: int, dtype: str = "float32") -> OfRank:
        shape = [2, 2]
        shape[dim] = count
        return lambda rank: _tensor(rank, tuple(shape), dtype, distinct)

    return {
        "one row": of_rows(1),
        "as many rows as ranks": of_rows(ranks),
        "one row more than ranks": of_rows(ranks + 1),
        "four rows for each rank": of_rows(4 * ranks),
        "one row more than that": of_rows(4 * ranks + 1),
        "int64": of_rows(2 * ranks + 1, "int64"),
        "bool": of_rows(2 * ranks + 1, "bool"),
        "dict": lambda rank: {"x": of_rows(ranks + 1)(rank), "y": of_rows(ranks + 1)(rank)},
    }


def _tensor(rank: int, shape: tuple[int, ...], dtype: str, numbers: Numbers) -> torch.Tensor:
    """Return a tensor of that shape and dtype."""
    import torch

    elements = numbers(rank, torch.arange(math.prod(shape)))
    if dtype == "bool":
        elements = elements // 2 % 2
    return elements.reshape(shape).to(getattr(torch, dtype))


def lists() -> Values:
    """Return lists of what can be pickled, of the same length on all ranks."""
    return {
        "texts": lambda rank: [f"text {rank}", ""],
        "dicts": lambda rank: [{"rank": rank, "tokens": [rank, 0]}],
        "tuples": lambda rank: [(rank, "row")] * 2,
    }


def uneven_lists(ranks: int) -> Values:
    """Return lists of what can be pickled, of another length on each rank."""
    return {
        "empty on rank 0": lambda rank: list(range(rank)),
        "empty on the last rank": lambda rank: list(range(ranks - 1 - rank)),
    }


def shared(ranks: int) -> Values:
    """Return values that all ranks have alike, for ranks to share out: some divide by the ranks."""
    import torch

    odd = 2 * ranks + 1

    def rows(count: int) -> torch.Tensor:
        return torch.arange(2 * count).reshape(count, 2)

    def texts() -> list[str]:
        return [f"prompt {number}" for number in range(odd)]

    return {
        "list": lambda _rank: list(range(odd)),
        "list that divides": lambda _rank: list(range(2 * ranks)),
        "list of one": lambda _rank: ["alone"],
        "tuple": lambda _rank: tuple(range(odd)),
        "tensor": lambda _rank: rows(odd),
        "tensor of one row": lambda _rank: rows(1),
        "bool": lambda _rank: rows(odd) % 2 == 0,
        "dict of lists": lambda _rank: {"prompt": texts(), "id": list(range(odd))},
        "dict of tensors": lambda _rank: {"x": rows(odd), "y": rows(odd)[:, 0]},
    }
