"""Values that ranks exchange: tensors of many dtypes and shapes, and lists and dicts.

A *law* (``laws``) calls these functions for the values of each rank. Each returns the name of a
value -> a function that makes it for a rank. All numbers are small and whole, so that sums and
means are exact in each dtype and in any order. torch is imported when a value is made: pytest's
process imports the laws too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

#: Makes a value for a rank.
OfRank = Callable[[int], Any]
#: Name of a value -> what makes it.
Values = Mapping[str, OfRank]

#: The names of dtypes, as torch has them.
FLOATING = ("float32", "bfloat16", "float16", "float64")
WHOLE = ("int64", "int32", "uint8")
ALL_DTYPES = (*FLOATING, *WHOLE, "bool")


class Pair(NamedTuple):
    """A named tuple, as models return it."""

    loss: Any
    logits: Any


def tensors(dtypes: tuple[str, ...] = ALL_DTYPES) -> Values:
    """Return tensors of two rows and three columns in each dtype, and other shapes in the first.

    Two are special: a view whose elements do not stand one after another in memory, and a tensor
    that needs a gradient.
    """
    made: dict[str, OfRank] = {}
    for dtype in dtypes:
        made[dtype] = _of_shape((2, 3), dtype)
    first = dtypes[0]
    made["no dimension"] = _of_shape((), first)
    made["one element"] = _of_shape((1,), first)
    made["no element"] = _of_shape((0, 3), first)
    made["transposed"] = lambda rank: _tensor(rank, (2, 3), first).t()
    if first in FLOATING:
        made["with a gradient"] = lambda rank: _tensor(rank, (3,), first).requires_grad_()
    return made


def nested(dtype: str = "float32") -> Values:
    """Return lists, tuples and dicts of tensors."""
    return {
        "list": lambda rank: [_tensor(rank, (1,), dtype), _tensor(rank, (2, 1), dtype)],
        "tuple": lambda rank: (_tensor(rank, (2,), dtype),),
        "named tuple": lambda rank: Pair(_tensor(rank, (1,), dtype), _tensor(rank, (1, 2), dtype)),
        # A key that is no name cannot be a keyword.
        "dict in a list": lambda rank: [
            {"x": _tensor(rank, (1,), dtype), 0: _tensor(rank, (2,), dtype)}
        ],
    }


def uneven(dim: int, dtypes: tuple[str, ...] = ALL_DTYPES) -> Values:
    """Return tensors that have more elements along a dimension, the higher the rank.

    Args:
        dim: The dimension, of two; negative ones count from the end.
        dtypes: The dtypes.
    """

    def of_length(dtype: str, shortest: int) -> OfRank:
        def make(rank: int) -> Any:
            shape = [2, 2]
            shape[dim] = rank + shortest
            return _tensor(rank, tuple(shape), dtype)

        return make

    made: dict[str, OfRank] = {}
    for dtype in dtypes:
        made[dtype] = of_length(dtype, 1)
    first = dtypes[0]
    made["no element on rank 0"] = of_length(first, 0)
    made["equally many"] = _of_shape((2, 2), first)
    made["dict"] = lambda rank: {"x": of_length(first, 1)(rank), "y": of_length(first, 2)(rank)}
    return made


def _of_shape(shape: tuple[int, ...], dtype: str) -> OfRank:
    """Return what makes a tensor of that shape and dtype for a rank."""
    return lambda rank: _tensor(rank, shape, dtype)


def _tensor(rank: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return a tensor of small whole numbers that differ from rank to rank."""
    import math

    import torch

    numbers = torch.arange(math.prod(shape)) + 1 + 2 * rank
    if dtype == "bool":
        numbers = numbers // 2 % 2
    return numbers.reshape(shape).to(getattr(torch, dtype))


def lists() -> Values:
    """Return lists of what can be pickled, of different lengths."""
    return {
        "texts": lambda rank: [f"text {rank}", ""],
        "dicts": lambda rank: [{"rank": rank, "tokens": [rank, 0]}],
        "as many as the rank": lambda rank: list(range(rank)),
        "tuples": lambda rank: [(rank, "row")] * 2,
    }


def shared(ranks: int) -> Values:
    """Return values that all ranks have alike, for ranks to share out: some divide by the ranks."""
    import torch

    def rows(count: int) -> torch.Tensor:
        return torch.arange(2 * count).reshape(count, 2)

    odd = 2 * ranks + 1
    return {
        "list": lambda _rank: list(range(odd)),
        "list that divides": lambda _rank: list(range(2 * ranks)),
        "list of one": lambda _rank: ["alone"],
        "tuple": lambda _rank: tuple(range(odd)),
        "tensor": lambda _rank: rows(odd),
        "tensor of one row": lambda _rank: rows(1),
        "bool": lambda _rank: rows(odd) % 2 == 0,
        "dict of lists": lambda _rank: {
            "prompt": list("abcdefghijk"[:odd]),
            "id": list(range(odd)),
        },
        "dict of tensors": lambda _rank: {"x": rows(odd), "y": rows(odd)[:, 0]},
    }
