"""Exchanges: functions of a trainer by which ranks exchange values, and what each rank should get.

An *exchange* is such a function: ``gather``, ``reduce``, ``split_between_processes``. Users call it
in their own loop, for a log, a metric or their prompts. A driver, the class by which a trainer is
tested, lists them in ``Driver.exchanges``. Each ``Exchange`` names a *contract*, which generates a
value for every rank and knows what each rank should get of them.

On a rank ``worker`` has ``calls.call_all`` make the calls. The check ``exchanges`` compares what
each rank got with what it should get.

- ``exchange``: the class ``Exchange``.
- ``contracts``: what each rank should get.
- ``values``: the values that ranks exchange.
- ``nested``: functions on dicts, lists and tuples of tensors.
- ``calls``: the calls on one rank.
"""

from pytest_distcompat.exchanges.contracts import (
    AnyRank,
    Broadcasts,
    BroadcastsLists,
    Contract,
    Fills,
    Gathers,
    GathersLists,
    OnRank,
    Pads,
    Reduces,
    Splits,
)
from pytest_distcompat.exchanges.exchange import Exchange

__all__ = [
    "AnyRank",
    "Broadcasts",
    "BroadcastsLists",
    "Contract",
    "Exchange",
    "Fills",
    "Gathers",
    "GathersLists",
    "OnRank",
    "Pads",
    "Reduces",
    "Splits",
]
