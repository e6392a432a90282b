"""The order of the items of suites, and which of all items are in this machine's shard.

The hook ``pytest_collection_modifyitems`` calls ``put_in_order`` in a session with a *budget*
(``--distcompat-budget 20m``: start no further cell after that time) and ``select_shard`` in one
with a *shard* (``--distcompat-shard 2/3``: run part 2 of 3 of the tests). A *suite* is a subclass
of ``CompatSuite``, with an item for each *check* in each *cell*, a configuration such as
``fsdp2-fp32-w2``. ``case_of(item)`` is the check and the cell of an item; None for an ordinary
test.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_distcompat.plugin.selection import case_of, cell_name
from pytest_distcompat.plugin.session import DistcompatSession
from pytest_distcompat.plugin.shard import FILE as SHARDS
from pytest_distcompat.plugin.shard import ORDINARY, Shard, divide
from pytest_distcompat.plugin.suite.why_not import why_not_run


def put_in_order(items: list[pytest.Item], session: DistcompatSession) -> None:
    """Sort the items, in place: first all other tests, then those of suites, cell by cell.

    The budget decides the order of cells: those that never ran, or were red, come first.
    """
    order = session.setting("budget").value.order(session.last_report)

    def position(item: pytest.Item) -> tuple[object, ...]:
        case = case_of(item)
        # An empty tuple is less than any other: all other tests come first.
        if case is None:
            return ()
        key: tuple[object, ...] = order(case.suite.driver, case.cell.id)
        return key

    items.sort(key=position)


def select_shard(session: DistcompatSession, shard: Shard, items: list[pytest.Item]) -> None:
    """Deselect the items of other shards, and write the shards into the session's store.

    Args:
        session: The session.
        shard: The shard of this machine, as ``Shard(number=2, count=3)``.
        items: All items; those of other shards are removed from the list.
    """
    items_of_unit: dict[str, list[pytest.Item]] = {}
    sizes: dict[str, float] = {}
    for item in items:
        unit = _shard_unit(item)
        items_of_unit.setdefault(unit, []).append(item)
        sizes[unit] = sizes.get(unit, 0) + _shard_size(item)
    # By the durations in the baseline (``--distcompat-baseline``, a report that all machines are
    # given), not by the last report of this machine: all must divide in the same way.
    plan = divide(sizes, session.setting("baseline").value, shard.count)
    # Whether this machine could run any case of each shard. At the end of the session
    # ``reporting/results`` reads it: that nothing ran is a failure only if no other shard has a
    # case that could run either.
    can_run = []
    for units in plan:
        items_of_shard = []
        for unit in units:
            items_of_shard += items_of_unit[unit]
        can_run.append(_any_can_run(items_of_shard, session))
    session.share(SHARDS, {"number": shard.number, "plan": plan, "can_run": can_run})
    own_units = plan[shard.number - 1]
    own = []
    others = []
    for item in items:
        if _shard_unit(item) in own_units:
            own.append(item)
        else:
            others.append(item)
    if others:
        session.config.hook.pytest_deselected(items=others)
        items[:] = own


def _shard_unit(item: pytest.Item) -> str:
    """Return the name of the unit of an item that must stay in one shard.

    A unit is a cell of a suite, or a module of other tests. The checks in a cell share runs. The
    other tests of a module share fixtures, and perhaps ranks.
    """
    case = case_of(item)
    if case is None:
        return item.nodeid.partition("::")[0]
    return cell_name(item, case.cell)


def _shard_size(item: pytest.Item) -> float:
    """Return the expected duration of a test, relative to a check or a marked test."""
    if case_of(item) is not None or item.get_closest_marker("distcompat"):
        return 1
    return ORDINARY


def _any_can_run(items: Iterable[pytest.Item], session: DistcompatSession) -> bool:
    """Tell whether this machine can run a case among these items."""
    for item in items:
        case = case_of(item)
        if case is not None and not why_not_run(case, session):
            return True
    return False
