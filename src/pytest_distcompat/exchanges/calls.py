"""Calls of a driver's exchanges on one rank, such as ``gather``, and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from pytest_distcompat.exchanges.exchange import Exchange
from pytest_distcompat.exchanges.nested import described, moved
from pytest_distcompat.trace import ExchangeInfo
from pytest_distcompat.world import World

#: How long a rank that has ended a call waits for the others to end it. A rank that raised an error
#: may have left them waiting for it.
PATIENCE = timedelta(seconds=30)


def call_all(exchanges: Mapping[str, Exchange], world: World) -> Iterator[ExchangeInfo]:
    """Call each exchange with each value of its law, and yield what it gave this rank.

    All ranks call it, and make the same calls in the same order. None begins a call before all have
    ended the one before it: a collective that some ranks left out would pair with one of the next
    call, and that would be blamed. So a call that raises an error on some ranks alone is the last.

    Args:
        exchanges: The exchanges by name.
        world: This rank.

    Raises:
        RuntimeError: This rank has ended a call, and another one is still in it.
    """
    raised_on_some = _meeting()
    for name, exchange in exchanges.items():
        for value_name, make in exchange.law.values(world.size).items():
            if value_name in exchange.unsupported:
                continue
            info = _call(name, exchange, value_name, make, world)
            try:
                is_last = raised_on_some(bool(info.error))
            except RuntimeError as error:
                ended = info.error or f"gave {info.got}"
                call = f"{name} of {value_name}"
                raise RuntimeError(
                    f"{call}: {ended} on this rank, and another rank did not end the call"
                ) from error
            if is_last and info.error:
                remark = "(not on all ranks, so no further call is made)"
                info = replace(info, error=f"{info.error} {remark}")
            yield info
            if is_last:
                return


def _meeting() -> Callable[[bool], bool]:
    """Return a function that all ranks call after each call, with whether it raised an error.

    It returns once all have called it: whether the call raised one on some ranks, and not on all.
    It has a process group of its own, so that it pairs with no collective of a call.
    """
    import torch

    if not torch.distributed.is_initialized():
        return lambda _raised: False
    group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
    ranks = torch.distributed.get_world_size()

    def raised_on_some(raised: bool) -> bool:
        count = torch.tensor(int(raised))
        torch.distributed.all_reduce(count, group=group)
        return 0 < int(count) < ranks

    return raised_on_some


def _call(
    name: str, exchange: Exchange, value_name: str, make: Callable[[int], Any], world: World
) -> ExchangeInfo:
    """Call an exchange with one value.

    Args:
        name: The name of the exchange.
        exchange: The exchange.
        value_name: The name of the value.
        make: What makes the value for a rank.
        world: This rank.
    """
    values = [make(rank) for rank in range(world.size)]
    value = moved(make(world.rank), world.device)
    value_before = described(value)
    got = ""
    error = ""
    try:
        got = described(exchange.call(value))
    except Exception as exception:
        first_line, *_ = str(exception).splitlines() or [""]
        error = f"{type(exception).__name__}: {first_line}"
    changed = ""
    value_after = described(value)
    if value_after != value_before and not exchange.in_place:
        changed = value_after
    expected = described(exchange.law.expected(values, world.rank))
    return ExchangeInfo(name, value_name, value_before, expected, got, error, changed)
