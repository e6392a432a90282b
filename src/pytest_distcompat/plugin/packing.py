"""Packing of tests on devices: how many ranks and nodes each needs, and the order under xdist.

The workers collect, the controller hands out. So the workers write into the session's store how many ranks each test needs,
and the controller plans the order, from durations of earlier sessions. No worker's list of tests is reordered: xdist requires
that all workers have the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import pytest

from pytest_distcompat.cell import uneven
from pytest_distcompat.plugin.marked.declare import mark_of, nodes_of, world_size_of
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


def note_nodes(session: DistcompatSession, items: Iterable[pytest.Item]) -> None:
    """Note in the session over how many nodes a test of it is spread at most, and whether one needs a directory of all nodes."""
    for item in items:
        mark = mark_of(item)
        case = case_of(item)
        if mark is not None:
            # Each rank writes for itself, but for what it puts into the fixture ``shared_dir``.
            world_size = world_size_of(item, mark, session)
            nodes = nodes_of(mark, session)
            shares = "shared_dir" in getattr(item, "fixturenames", ())
        elif case is not None:
            # Runs of a suite go on from one another's files, unless its checkpoints are those of single nodes.
            world_size = case.cell.world_size
            nodes = case.cell.nodes
            shares = not (case.cell.per_node and nodes > 1)
        else:
            continue
        if uneven(world_size, nodes):
            continue
        session.nodes = max(session.nodes, nodes)
        if shares and (nodes > 1 or session.worker_nodes > 0):
            session.shares = True


def write_demands(
    session: DistcompatSession, collected: Sequence[pytest.Item], items: Sequence[pytest.Item]
) -> None:
    """Write the demands into the store.

    Args:
        session: The session of this process.
        collected: The items in the order of collection, before plugins changed it.
        items: The items that will run.
    """
    demand_of_item: dict[str, str] = {}
    world_sizes: dict[str, int] = {}
    distributed = []
    for item in items:
        demand = _demand(item, session)
        if demand is None:
            continue
        name, world_size = demand
        distributed.append(item)
        demand_of_item[item.nodeid] = name
        world_sizes[name] = world_size
    ordered = _is_reordered(distributed, collected)
    session.share(FILE, asdict(Demands(demand_of_item, world_sizes, ordered)))


def _demand(item: pytest.Item, session: DistcompatSession) -> tuple[str, int] | None:
    """Return the name of an item's demand and its number of ranks; None for an ordinary test.

    The checks of a suite's cell share runs, and marked tests may share ranks by an extension: together they are one demand.
    """
    mark = mark_of(item)
    if mark is not None:
        group: str | None = session.config.hook.pytest_distcompat_group(session=session, item=item)
        name = group or item.nodeid
        return name, world_size_of(item, mark, session)
    case = case_of(item)
    if case is not None:
        return cell_name(item, case.cell), case.cell.world_size
    return None


def _is_reordered(items: Sequence[pytest.Item], collected: Sequence[pytest.Item]) -> bool:
    """Tell whether the items are in another order than they were collected in."""
    position = {item: number for number, item in enumerate(collected)}
    order = []
    for item in items:
        if item in position:
            order.append(position[item])
    return order != sorted(order)


def read_demands(session: DistcompatSession) -> Demands | None:
    """Return the demands in the store; None in a session without distributed tests."""
    data = session.shared(FILE)
    return None if data is None else Demands(**data)


def plan(session: DistcompatSession, collection: Sequence[str], workers: int) -> list[list[int]]:
    """Return the indices of distributed tests in the collection, in the order in which to hand them out.

    Each list holds the tests of one demand. There are none without distributed tests, or if another plugin orders them.
    """
    demands = read_demands(session)
    if demands is None or demands.ordered:
        return []
    from pytest_distcompat.lease import Demand, pack

    units: dict[str, list[int]] = {}
    for index, nodeid in enumerate(collection):
        if nodeid in demands.items:
            units.setdefault(demands.items[nodeid], []).append(index)
    if not units:
        return []
    seconds = _cached_seconds(session.config)
    to_pack = []
    for name, unit in units.items():
        to_pack.append(Demand(name, demands.world_sizes[name], seconds.get(name), len(unit)))
    # A place of a GPU that runs share counts as a device: a rank needs one.
    devices = len(session.inventory.ids) * session.inventory.places * max(1, session.worker_nodes)
    return [units[demand.id] for demand in pack(to_pack, devices, workers)]


def _cached_seconds(config: pytest.Config) -> dict[str, float]:
    # Without pytest's cache plugin the configuration has no such attribute.
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if cache is None:
        return {}
    seconds: dict[str, float] = cache.get(CACHE, {})
    return seconds


def keep_durations(session: DistcompatSession, exitstatus: int) -> None:
    """Write the durations of the session's demands to the cache, unless it was interrupted."""
    cache = getattr(session.config, "cache", None)
    demands = read_demands(session)
    if (
        exitstatus not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
        or cache is None
        or demands is None
    ):
        return
    from pytest_distcompat.lease import read_timeline

    seconds: dict[str, float] = {}
    # Without the time that each demand waited for its devices.
    for span in read_timeline(session.store):
        name = demands.items.get(span.who)
        if name:
            seconds[name] = seconds.get(name, 0.0) + span.seconds
    if not seconds:
        return
    kept = _cached_seconds(session.config)
    for name, duration in seconds.items():
        kept[name] = round(duration, 3)
    cache.set(CACHE, kept)
