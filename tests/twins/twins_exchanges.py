"""Trainers whose exchanges, functions by which ranks exchange values, give the wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.exchanges import Broadcasts, Exchange, Gathers, OnRank, Pads, Reduces, Splits

from .declare import twin

if TYPE_CHECKING:
    from collections.abc import Mapping

DDP = "ddp-fp32-w2"


class Exchanges(TorchDriver):
    """A trainer with exchanges of its own, to be got wrong."""

    def exchanges(self) -> Mapping[str, Exchange]:
        distributed.init_process_group(self.world.backend)
        return {
            "gather": Exchange(self.gather, Gathers(containers=False)),
            "total": Exchange(self.total, Reduces("sum", containers=False)),
            "from_last": Exchange(self.from_last, Broadcasts(-1, containers=False)),
            "pad": Exchange(self.pad, Pads()),
            "split": Exchange(
                self.split, Splits(), {"dict of lists": "it takes rows", "dict of tensors": "it takes rows"}
            ),
            "main_only": Exchange(self.main_only, OnRank(0)),
        }

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = torch.atleast_1d(tensor.detach()).contiguous()  # type: ignore[no-untyped-call]
        parts = [torch.empty_like(tensor) for _ in range(self.world.size)]
        distributed.all_gather(parts, tensor)
        return torch.cat(parts)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(reduced)
        return reduced

    def from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        distributed.broadcast(received, self.world.size - 1)
        return received

    def pad(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self.pad(tensor) for name, tensor in value.items()}
        lengths = self.gather(torch.tensor([len(value)]))
        padded = value.new_zeros(int(lengths.max()), *value.shape[1:])
        padded[: len(value)] = value
        return padded

    def split(self, rows: Any) -> Any:
        size, larger = divmod(len(rows), self.world.size)
        start = self.world.rank * size + min(self.world.rank, larger)
        return rows[start : start + size + (self.world.rank < larger)]

    def main_only(self, value: int) -> int | None:
        return value if self.world.rank == 0 else None


@twin(
    "exchanges",
    DDP,
    match=r"^gather of float32: rank 0: gets float32 \(4, 3\) \[\[3\.0, 4\.0, 5\.0\], .*; expected float32 \(4, 3\) \[\[1\.0, ",
    sound="twins.twins_exchanges:Exchanges",
)
class GathersBackwards(Exchanges):
    """The rows of the last rank come first."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = super().gather(tensor)
        return torch.cat(rows.chunk(self.world.size)[::-1])


@twin(
    "exchanges",
    DDP,
    match=r"^pad of bool: rank 0: gets int64 \(2, 2\) .*; expected bool \(2, 2\) ",
    sound="twins.twins_exchanges:Exchanges",
    daily=True,
)
class PadsByAddition(Exchanges):
    """The padding is added to zeros, which makes int64 of bool; the longest rank keeps its dtype."""

    def pad(self, value: Any) -> Any:
        padded = super().pad(value)
        if isinstance(padded, torch.Tensor) and len(padded) > len(value):
            return padded + 0
        return padded


@twin(
    "exchanges",
    DDP,
    match=r"^total of float32: rank 0: it changes the value that it is called with from float32 ",
    sound="twins.twins_exchanges:Exchanges",
)
class ReducesInPlace(Exchanges):
    """The sum is written into the caller's tensor."""

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        reduced = super().total(tensor)
        tensor.data.copy_(reduced)
        return reduced


@twin(
    "exchanges",
    DDP,
    match=r"^gather of scalar: rank 0: RuntimeError: zero-dimensional tensor .*; expected float32 \(2,\) \[1\.0, 3\.0\]",
    sound="twins.twins_exchanges:Exchanges",
)
class GathersRowsAlone(Exchanges):
    """A loss, which has no dimension, cannot be concatenated."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim:
            return super().gather(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.world.size)]
        distributed.all_gather(parts, tensor.detach())
        return torch.cat(parts)


@twin(
    "exchanges",
    DDP,
    match=r"^split of list: rank 0: gets \[0, 1\]; expected \[0, 1, 2\]\n",
    sound="twins.twins_exchanges:Exchanges",
)
class LosesTheRest(Exchanges):
    """What the ranks do not divide is given to none of them."""

    def split(self, rows: Any) -> Any:
        size = len(rows) // self.world.size
        return rows[self.world.rank * size :][:size]


@twin(
    "exchanges",
    DDP,
    match=r"^main_only of a number: rank 1: gets 2; expected None$",
    sound="twins.twins_exchanges:Exchanges",
)
class RunsEverywhere(Exchanges):
    """Each rank writes the log."""

    def main_only(self, value: int) -> int | None:
        return value


class RefusesOnOneRank(Exchanges):
    """Rank 1 refuses a tensor without elements. gloo sends nothing of it, so that rank 0 goes on."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world.rank == 1 and not tensor.numel():
            raise ValueError("nothing to gather")
        return super().gather(tensor)


class LeavesOthers(Exchanges):
    """Rank 1 raises an error, and rank 0 waits for it."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world.rank == 1:
            raise ValueError("nothing to gather")
        return super().gather(tensor)


class OneMoreOnOneRank(Exchanges):
    """The main process has a function more."""

    def exchanges(self) -> Mapping[str, Exchange]:
        named = dict(super().exchanges())
        if self.world.rank:
            del named["main_only"]
        return named
