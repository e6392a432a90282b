"""Calls of a driver's exchanges on one rank, such as ``gather``, and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from pytest_distcompat.exchanges.exchange import Exchange
from pytest_distcompat.exchanges.nested import as_text, to_device
from pytest_distcompat.exchanges.values import REQUIRES_GRAD
from pytest_distcompat.trace import ExchangeInfo
from pytest_distcompat.world import World

#: How long a rank that has ended a call waits for the others to end it. A rank that raised an error
#: may have left them waiting for it.
LONGEST_WAIT = timedelta(seconds=30)


@dataclass(frozen=True)
class Call:
    """A call of an exchange with one value.

    Attributes:
        name: The name of the function.
        exchange: The function.
        value_name: The name of the value.
        values: The value of each rank.
    """

    name: str
    exchange: Exchange
    value_name: str
    values: list[Any]

    def __str__(self) -> str:
        """Return it as findings name it: ``gather of bool``."""
        return f"{self.name} of {self.value_name}"


def call_all(exchanges: Mapping[str, Exchange], world: World) -> Iterator[ExchangeInfo]:
    """Call each exchange with each value of its contract, and yield what it gave this rank.

    All ranks call it, and make the same calls in the same order. None begins a call before all have
    ended the one before it: a collective that some ranks left out would pair with one of the next
    call, and that would be blamed. So a call that raises an error on some ranks alone is the last.

    Args:
        exchanges: The exchanges by name.
        world: This rank.

    Raises:
        ValueError: ``unsupported`` of an exchange has a value that its contract has not.
        RuntimeError: This rank has ended a call, and another one is still in it; or it is to make
            other calls than another rank.
    """
    # All values are made before the first call: an error in a contract comes on all ranks at once.
    calls = list(_calls(exchanges, world.size))
    raised_on_some = _meeting([str(call) for call in calls])
    for call in calls:
        info = _made(call, world)
        try:
            is_last = raised_on_some(bool(info.error))
        except RuntimeError as error:
            ended = info.error or f"gave {info.got}"
            raise RuntimeError(
                f"{call}: {ended} on this rank, and another rank did not end the call"
            ) from error
        if is_last and info.error:
            remark = "(not on all ranks, so no further call is made)"
            info = replace(info, error=f"{info.error} {remark}")
        yield info
        if is_last:
            return


def _calls(exchanges: Mapping[str, Exchange], ranks: int) -> Iterator[Call]:
    """Yield the calls of all exchanges, in order."""
    for name, exchange in exchanges.items():
        makers = exchange.contract.values(ranks)
        unknown = sorted(exchange.unsupported.keys() - makers.keys())
        if unknown:
            names = ", ".join(makers)
            raise ValueError(f"{name}: unsupported has {unknown[0]!r}; its values are {names}")
        for value_name, make in makers.items():
            if value_name in exchange.unsupported:
                continue
            if exchange.in_place and value_name == REQUIRES_GRAD:
                continue
            values = [make(rank) for rank in range(ranks)]
            yield Call(name, exchange, value_name, values)


def _meeting(calls: list[str]) -> Callable[[bool], bool]:
    """Return a function that all ranks call after each call, with whether it raised an error.

    It returns once all have called it: whether the call raised one on some ranks, and not on all.
    It has a process group of its own, so that it pairs with no collective of a call.

    Args:
        calls: The calls that this rank is to make.
    """
    import torch

    if not torch.distributed.is_initialized():
        return lambda _raised: False
    group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    ranks = torch.distributed.get_world_size()
    calls_by_rank: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(calls_by_rank, calls, group=group)
    if any(other != calls for other in calls_by_rank):
        counts = ", ".join(str(len(other)) for other in calls_by_rank)
        raise RuntimeError(
            "exchanges() names other functions, or in another order, on some ranks; "
            f"the ranks are to make {counts} calls"
        )

    def raised_on_some(raised: bool) -> bool:
        count = torch.tensor(int(raised))
        torch.distributed.all_reduce(count, group=group)
        return 0 < int(count) < ranks

    return raised_on_some


def _made(call: Call, world: World) -> ExchangeInfo:
    """Make a call, and return what it gave this rank."""
    # Before the call, which may change its argument.
    expected = as_text(call.exchange.contract.expected(call.values, world.rank))
    value = to_device(call.values[world.rank], world.device)
    if call.value_name == REQUIRES_GRAD:
        value.requires_grad_()
    value_before = as_text(value)
    got = ""
    error = ""
    try:
        result = call.exchange.call(value)
        if result is None and call.exchange.in_place:
            result = value
        got = as_text(result)
    except Exception as exception:
        first_line, *_ = str(exception).splitlines() or [""]
        error = f"{type(exception).__name__}: {first_line}"
    changed = ""
    value_after = as_text(value)
    if value_after != value_before and not call.exchange.in_place:
        changed = value_after
    return ExchangeInfo(call.name, call.value_name, value_before, expected, got, error, changed)
