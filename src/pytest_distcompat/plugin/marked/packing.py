"""What tests ask for, in which order xdist should hand them out so that devices are busy, and how busy they were.

The workers collect, the controller hands out. So the workers leave in the session's store what each test asks for, and the
controller orders it, by what it remembers of earlier runs. Nobody's list of tests is reordered: all workers must have the
same one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.lease import Span
    from pytest_distcompat.plugin.session import DistcompatSession

#: In the store: what each test asks for.
FILE = "demands.json"
#: In pytest's cache: for how many seconds each demand had its devices when it last ran.
CACHE = "distcompat/seconds"


@dataclass(frozen=True)
class Announced:
    """What a process that collected has to say: of each of our items its demand, of each demand its world size.

    ``ordered``: a plugin or a conftest.py put our items into an order of its own, which is not ours to change.
    """

    items: Mapping[str, str]
    world_sizes: Mapping[str, int]
    ordered: bool


def announce(session: DistcompatSession, collected: Sequence[pytest.Item], items: Sequence[pytest.Item]) -> None:
    """Leave it in the store. ``collected`` are the items before plugins had their say, ``items`` those that will run."""
    of_items: dict[str, str] = {}
    world_sizes: dict[str, int] = {}
    ours = []
    for item in items:
        demand = _demand(item, session)
        if demand is not None:
            ours.append(item)
            of_items[item.nodeid], world_sizes[demand[0]] = demand[0], demand[1]
    place = {item: number for number, item in enumerate(collected)}
    places = [place[item] for item in ours if item in place]
    told = Announced(of_items, world_sizes, places != sorted(places))
    # On a full disk there is no plan; tests say for themselves what they cannot write.
    with contextlib.suppress(OSError):
        # All workers write the same, some of them at the same time.
        waiting = session.store / f"{FILE}.{os.getpid()}"
        waiting.write_text(json.dumps(asdict(told)), encoding="utf-8")
        waiting.rename(session.store / FILE)


def _demand(item: pytest.Item, session: DistcompatSession) -> tuple[str, int] | None:
    """The name of what it asks for and how many ranks that is; None for an ordinary test.

    The checks of a suite's cell share runs, and tests that reuse ranks share those: together they are one demand.
    """
    from pytest_distcompat.plugin.marked import marker

    mark = marker.mark_of(item)
    if mark is not None:
        return marker.scope_of(item, session) or item.nodeid, marker.world_size_of(item, mark, session)
    callspec: Any = getattr(item, "callspec", None)
    case = callspec.params.get("distcompat_case") if callspec is not None else None
    # A suite of which no case was chosen has one item, which pytest skips, with a parameter that stands for none.
    cell = getattr(case, "cell", None)
    if cell is None:
        return None
    assert item.parent is not None
    return f"{item.parent.nodeid}[{cell.id}]", cell.world_size


def announced(session: DistcompatSession) -> Announced | None:
    """What was left in the store; None in a session without tests of ours."""
    path = session.store_path / FILE
    return Announced(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def plan(session: DistcompatSession, collection: Sequence[str], workers: int) -> list[list[int]]:
    """The places in the collection of our tests, those of one demand together, in the order in which to hand them out.

    Empty if there are none, or if somebody else orders them.
    """
    told = announced(session)
    if told is None or told.ordered:
        return []
    from pytest_distcompat.lease import Demand, pack

    units: dict[str, list[int]] = {}
    for index, nodeid in enumerate(collection):
        if nodeid in told.items:
            units.setdefault(told.items[nodeid], []).append(index)
    known = _remembered(session.config)
    demands = [Demand(name, told.world_sizes[name], known.get(name), len(unit)) for name, unit in units.items()]
    return [units[demand.id] for demand in pack(demands, len(session.inventory.ids), workers)] if demands else []


def _remembered(config: pytest.Config) -> dict[str, float]:
    # Without the cache plugin there is no such attribute.
    cache: pytest.Cache | None = getattr(config, "cache", None)
    return {} if cache is None else cache.get(CACHE, {})


def remember(session: DistcompatSession, spans: Iterable[Span]) -> None:
    """Keep for how long each demand had its devices: the time a test waited for them says nothing of the next run."""
    told, cache = announced(session), getattr(session.config, "cache", None)
    if told is None or cache is None:
        return
    found: dict[str, float] = {}
    for span in spans:
        name = told.items.get(span.who)
        if name is not None:
            found[name] = round(found.get(name, 0.0) + span.seconds, 3)
    if found:
        cache.set(CACHE, {**_remembered(session.config), **found})


class Devices:
    """Looks after the record of leases, in the process that talks to the user."""

    def __init__(self, session: DistcompatSession) -> None:
        self.session = session

    def _spans(self) -> list[Span]:
        if not self.session.store_path.exists():
            return []
        from pytest_distcompat.lease import read_timeline

        return read_timeline(self.session.store)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Remember a run that came to its end."""
        if exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
            remember(self.session, self._spans())

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """With ``-v``: how busy the devices were. With ``-vv``: who had which when."""
        verbosity = self.session.config.get_verbosity()
        spans = self._spans() if verbosity > 0 else []
        if not spans:
            return
        from pytest_distcompat.lease import busy, chart

        inventory = self.session.inventory
        length = max(span.released.monotonic for span in spans) - spans[0].got.monotonic
        terminalreporter.write_line(
            f"distcompat: {len(inventory.ids)} {inventory.words} were leased for {busy(spans, inventory.ids):.0%} of "
            f"{length:.1f} s, by {len(spans)} process groups"
        )
        for line in chart(spans, inventory.ids) if verbosity > 1 else ():
            terminalreporter.write_line(line)
