"""Packing of tests on devices: how many ranks each needs, and the order under xdist.

The workers collect, the controller hands out. So the workers write into the session's store how many ranks each test needs,
and the controller plans the order, from durations of earlier sessions. No worker's list of tests is reordered: xdist requires
that all workers have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import pytest

from pytest_distcompat.grouping import grouped
from pytest_distcompat.plugin.marked.declare import mark_of, scope_of, world_size_of
from pytest_distcompat.plugin.selection import case_of, cell_name
from pytest_distcompat.plugin.session import DistcompatSession

#: The file in the store with the ``Demands``.
FILE = "demands.json"
#: The key in pytest's cache: seconds for which each demand had its devices when it last ran.
CACHE = "distcompat/seconds"


@dataclass(frozen=True)
class Demands:
    """Demands of the distributed tests that a process collected. Items with one demand share ranks or runs.

    Attributes:
        items: The name of each item's demand, by node id.
        world_sizes: The number of ranks of each demand.
        ordered: Whether a plugin or a conftest.py changed the order of these items; it must then be kept.
    """

    items: Mapping[str, str]
    world_sizes: Mapping[str, int]
    ordered: bool


def write_demands(session: DistcompatSession, collected: Sequence[pytest.Item], items: Sequence[pytest.Item]) -> None:
    """Write the demands into the store.

    Args:
        session: The session of this process.
        collected: The items in the order of collection, before plugins changed it.
        items: The items that will run.
    """
    of_items: dict[str, str] = {}
    world_sizes: dict[str, int] = {}
    distributed = []
    for item in items:
        demand = _demand(item, session)
        if demand is not None:
            distributed.append(item)
            of_items[item.nodeid], world_sizes[demand[0]] = demand[0], demand[1]
    index = {item: number for number, item in enumerate(collected)}
    order = [index[item] for item in distributed if item in index]
    session.share(FILE, asdict(Demands(of_items, world_sizes, order != sorted(order))))


def _demand(item: pytest.Item, session: DistcompatSession) -> tuple[str, int] | None:
    """Return the name of an item's demand and its number of ranks; None for an ordinary test.

    The checks of a suite's cell share runs, and tests that reuse ranks share ranks: together they are one demand.
    """
    mark = mark_of(item)
    if mark is not None:
        return scope_of(item, session) or item.nodeid, world_size_of(item, mark, session)
    case = case_of(item)
    return None if case is None else (cell_name(item, case.cell), case.cell.world_size)


def read_demands(session: DistcompatSession) -> Demands | None:
    """Return the demands in the store; None in a session without distributed tests."""
    found = session.shared(FILE)
    return Demands(**found) if found is not None else None


def plan(session: DistcompatSession, collection: Sequence[str], workers: int) -> list[list[int]]:
    """Return the indices of distributed tests in the collection, in the order in which to hand them out.

    Each list holds the tests of one demand. There are none without distributed tests, or if another plugin orders them.
    """
    demands = read_demands(session)
    if demands is None or demands.ordered:
        return []
    from pytest_distcompat.lease import Demand, pack

    units = grouped(
        (demands.items[nodeid], index) for index, nodeid in enumerate(collection) if nodeid in demands.items
    )
    seconds = _cached_seconds(session.config)
    to_pack = [Demand(name, demands.world_sizes[name], seconds.get(name), len(unit)) for name, unit in units.items()]
    if not to_pack:
        return []
    # A place of a GPU that runs share counts as a device: a rank needs one.
    devices = len(session.inventory.ids) * session.inventory.places * max(1, session.worker_nodes)
    return [units[demand.id] for demand in pack(to_pack, devices, workers)]


def _cached_seconds(config: pytest.Config) -> dict[str, float]:
    # Without pytest's cache plugin the configuration has no such attribute.
    cache: pytest.Cache | None = getattr(config, "cache", None)
    return {} if cache is None else cache.get(CACHE, {})


def keep_durations(session: DistcompatSession, exitstatus: int) -> None:
    """Write the durations of the session's demands to the cache, unless it was interrupted."""
    cache, demands = getattr(session.config, "cache", None), read_demands(session)
    if exitstatus not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} or cache is None or demands is None:
        return
    from pytest_distcompat.lease import read_timeline

    seconds: dict[str, float] = {}
    # Without the time that each demand waited for its devices.
    for span in read_timeline(session.store):
        if name := demands.items.get(span.who):
            seconds[name] = seconds.get(name, 0.0) + span.seconds
    if seconds:
        rounded = {name: round(one, 3) for name, one in seconds.items()}
        cache.set(CACHE, {**_cached_seconds(session.config), **rounded})
