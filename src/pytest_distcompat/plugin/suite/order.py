"""The order of the items of suites, and which of all items are in this machine's shard."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_distcompat.plugin.selection import case_of, cell_name
from pytest_distcompat.plugin.session import DistcompatSession
from pytest_distcompat.plugin.shard import FILE as SHARDS
from pytest_distcompat.plugin.shard import ORDINARY, Shard, divide
from pytest_distcompat.plugin.suite.why_not import why_not_run


def put_in_order(items: list[pytest.Item], session: DistcompatSession) -> None:
    """Sort the items of suites as the session's budget orders their cells.

    All other tests come first.
    """
    order = session.setting("budget").value.order(session.last_report)

    def position(item: pytest.Item) -> tuple[object, ...]:
        case = case_of(item)
        if case is None:
            return ()
        key: tuple[object, ...] = order(case.suite.driver, case.cell.id)
        return key

    items.sort(key=position)


def select_shard(session: DistcompatSession, shard: Shard, items: list[pytest.Item]) -> None:
    """Deselect the items of other shards, and write the shards into the session's store."""
    items_of_unit: dict[str, list[pytest.Item]] = {}
    sizes: dict[str, float] = {}
    for item in items:
        unit = _shard_unit(item)
        items_of_unit.setdefault(unit, []).append(item)
        sizes[unit] = sizes.get(unit, 0) + _shard_size(item)
    # By the baseline, not by the last report, because all machines must divide in the same way.
    plan = divide(sizes, session.setting("baseline").value, shard.count)
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
