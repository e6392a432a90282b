"""Exchanges: functions of a trainer by which ranks exchange values, and what each should give.

An *exchange* is such a function: ``gather``, ``reduce``, ``split_between_processes``. Users call it
in their own loop, for a log, a metric or their prompts. A driver, the class by which a trainer is
tested, lists them in ``Driver.exchanges``. Each ``Exchange`` names the law that it should keep. The
law generates a value for every rank, and knows what each rank should get of them.

On a rank ``worker`` has ``calls.call_all`` call them. The check ``exchanges`` compares what each
rank got with what the laws expect.

- ``exchange``: the class ``Exchange``.
- ``laws``: what each rank should get.
- ``values``: the values that ranks exchange.
- ``nested``: functions on dicts, lists and tuples of tensors.
- ``calls``: the calls on one rank.
"""

from pytest_distcompat.exchanges.exchange import Exchange
from pytest_distcompat.exchanges.laws import (
    AnyRank,
    Broadcasts,
    BroadcastsLists,
    Gathers,
    GathersLists,
    Law,
    OnRank,
    Pads,
    Reduces,
    Splits,
)

__all__ = [
    "AnyRank",
    "Broadcasts",
    "BroadcastsLists",
    "Exchange",
    "Gathers",
    "GathersLists",
    "Law",
    "OnRank",
    "Pads",
    "Reduces",
    "Splits",
]
