"""Packing of tests on devices: how many ranks each needs, and where, and the order under xdist.

A distributed test runs on *ranks*, the processes of a process group. Its group *leases* devices
(GPUs, or slots of the CPU) and waits while others have them. So the order of tests decides how long
devices are idle. xdist's workers collect the tests, and its controller hands them out:

1. In each worker the hook ``pytest_collection_finish`` calls ``write_demands``. It writes into the
   *store*, a directory that all processes of the session share, how many ranks each test needs.
2. In the controller the scheduler (``packed.PackedScheduling``) calls ``plan``, which reads that
   and returns the order, also by the durations of earlier sessions.
3. At the end of the session ``keep_durations`` writes the durations into pytest's cache.

No worker reorders its own list of tests, because xdist requires that all workers have the same one.

A *suite* is a subclass of ``CompatSuite``. It has an item for each *check* in each *cell*, as
``TestA::test[fsdp2-fp32-w2:names]``: the item is called a *case*, its cell is ``fsdp2-fp32-w2``.
All checks of a cell read the same *runs*, so that the first of them starts the runs for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import pytest

from pytest_distcompat.plugin.marked.declare import mark_of, spread_of, world_size_of
from pytest_distcompat.plugin.selection import case_of, cell_name
from pytest_distcompat.plugin.session import DistcompatSession

#: The file in the store with the ``Demands``.
FILE = "demands.json"
#: The key in pytest's cache. The value has the name of each demand to the seconds for which it last
#: used its devices.
CACHE = "distcompat/seconds"


@dataclass(frozen=True)
class Demands:
    """The demands for devices of the distributed tests that a process collected.

    A demand is one request for devices. Tests that share ranks or runs have one demand together.
    The name of a demand is a node id, or that of a suite with a cell:
    ``a.py::TestA[fsdp2-fp32-w2]``.

    Attributes:
        items: The node id of each test to the name of its demand.
        world_sizes: The name of each demand to its number of ranks.
        ordered: Whether a plugin or a conftest.py has ordered the tests, so that the order must
            stay.
    """

    items: Mapping[str, str]
    world_sizes: Mapping[str, int]
    ordered: bool


def note_spread(session: DistcompatSession, items: Iterable[pytest.Item]) -> None:
    """Tell the session's placement how each test is spread over machines.

    The placement is the part of the session that knows on which machines runs are. It also learns
    whether the ranks of a test must see the same files.
    """
    for item in items:
        mark = mark_of(item)
        case = case_of(item)
        if mark is not None:
            # Ranks share files only in the directory of the fixture ``shared_dir``.
            spread = spread_of(item, mark, session)
            shares = "shared_dir" in getattr(item, "fixturenames", ())
        elif case is not None:
            # A run of a suite loads files that another run saved, perhaps on another machine. Only
            # in a cell spread over machines can each of them have a checkpoint of its own.
            spread = case.cell.spread
            shares = spread.on_one or not case.cell.own_disks
        else:
            continue
        session.placement.note(spread, shares=shares)


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
    # All workers write the same.
    session.share(FILE, asdict(Demands(demand_of_item, world_sizes, ordered)))


def _demand(item: pytest.Item, session: DistcompatSession) -> tuple[str, int] | None:
    """Return the name of a test's demand and its number of ranks; None for an ordinary test.

    All checks in a cell of a suite have one demand, because they share runs. So have marked tests
    that share ranks by an extension.
    """
    mark = mark_of(item)
    if mark is not None:
        # An extension may run several tests on the same ranks, one after the other: then they
        # have this key in common, such as ``module tests/test_a.py 2``.
        group: str | None = session.config.hook.pytest_distcompat_group(session=session, item=item)
        name = group or item.nodeid
        return name, world_size_of(item, mark, session)
    case = case_of(item)
    if case is not None:
        return cell_name(item, case.cell), case.cell.world_size
    return None


def _is_reordered(items: Sequence[pytest.Item], collected: Sequence[pytest.Item]) -> bool:
    """Tell whether the items are in another order than that in which they were collected.

    An item that was not collected, but added by a plugin, does not count.
    """
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
    """Return the distributed tests in the order in which the controller should hand them out.

    Args:
        session: The session of the controller.
        collection: The node ids of all tests, as the workers have collected them.
        workers: The number of workers.

    Returns:
        A list for each demand, of the indices of its tests in the collection. Nothing if there are
        no distributed tests, or if another plugin has ordered them.
    """
    demands = read_demands(session)
    # Somebody ordered the tests on purpose (pytest-order): the order stays.
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
        demand = Demand(
            id=name,
            world_size=demands.world_sizes[name],
            seconds=seconds.get(name),
            items=len(unit),
        )
        to_pack.append(demand)
    # If several runs can share a GPU, each of its places counts as a device. Each xdist worker
    # may have a machine of its own.
    machines = session.placement.machines_of_workers
    devices = len(session.inventory.ids) * session.inventory.places * machines
    # Long demands come first, then those of many ranks.
    packed = pack(to_pack, devices, workers)
    return [units[demand.id] for demand in packed]


def _cached_seconds(config: pytest.Config) -> dict[str, float]:
    """Return the name of each demand to the seconds that it took in an earlier session."""
    # Without pytest's plugin ``cacheprovider`` the configuration has no attribute ``cache``.
    cache: pytest.Cache | None = getattr(config, "cache", None)
    if cache is None:
        return {}
    seconds: dict[str, float] = cache.get(CACHE, {})
    return seconds


def keep_durations(session: DistcompatSession, exitstatus: int) -> None:
    """Write the durations of the session's demands to the cache, unless it was interrupted.

    Args:
        session: The session of the process with the terminal.
        exitstatus: pytest's exit code of the session.
    """
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
    # A span of the timeline is the time for which the test ``span.who`` had its devices. The time
    # for which it waited for them is not in it.
    for span in read_timeline(session.store):
        name = demands.items.get(span.who)
        if name:
            seconds[name] = seconds.get(name, 0.0) + span.seconds
    if not seconds:
        return
    # Demands that this session did not have stay.
    kept = _cached_seconds(session.config)
    for name, duration in seconds.items():
        kept[name] = round(duration, 3)
    cache.set(CACHE, kept)
