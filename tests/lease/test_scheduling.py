"""The real scheduler of xdist with ours on top, on workers and devices that are played: time is what the script says."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.lease.simulation import simulate

from pytest_distcompat.lease import Demand, pack
from pytest_distcompat.lease.packing import ideal
from pytest_distcompat.lease.tickets import Ticket, ahead

pytest.importorskip("xdist")

from pytest_distcompat.plugin.packed import PackedScheduling

DEVICES = 8
IDS = tuple(f"gpu-{number}" for number in range(DEVICES))

Units = list[list[int]]


@dataclass(eq=False)
class Worker:
    """Simulated xdist worker: it starts a test once it knows the next one."""

    name: str
    queue: deque[int] = field(default_factory=deque)
    done: list[int] = field(default_factory=list)
    shutting_down: bool = False
    busy: bool = False

    def __post_init__(self) -> None:
        self.gateway = SimpleNamespace(id=self.name)

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down
        self.queue.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True

    def next_test(self) -> int | None:
        """Return the test that it starts now, if any."""
        if self.busy or not self.queue:
            return None
        knows_the_next = len(self.queue) > 1 or self.shutting_down
        if not knows_the_next:
            return None
        self.busy = True
        return self.queue.popleft()


@dataclass(frozen=True)
class Waiting:
    """A test that a worker has begun, and that waits for devices."""

    ticket: Ticket
    worker: Worker
    index: int


@dataclass(frozen=True, order=True)
class Running:
    """A test that has its devices; ordered by the time at which it ends."""

    end: float
    number: int
    worker: Worker = field(compare=False)
    index: int = field(compare=False)
    devices: list[str] = field(compare=False)


@dataclass
class Play:
    """A session: what each test asks for, by its place; nothing, for an ordinary one."""

    scheduler: Any
    workers: list[Worker]
    demands: Mapping[int, Demand]
    began: list[int] = field(default_factory=list)
    time: float = 0.0
    free: set[str] = field(default_factory=lambda: set(IDS))
    waiting: list[Waiting] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)

    def run(self) -> Play:
        """Run until nothing happens any more."""
        while True:
            self.begin_tests()
            self.grant_devices()
            if not self.running:
                return self
            self.end_test()

    def begin_tests(self) -> None:
        """Let each worker that can begin its next test ask for devices."""
        for worker in self.workers:
            index = worker.next_test()
            if index is None:
                continue
            self.began.append(index)
            number = len(self.began)
            demand = self.demands.get(index)
            if demand is None:
                ticket = Ticket(number, (), 0, str(index))
            else:
                ticket = Ticket(number, IDS, demand.world_size, str(index))
            self.waiting.append(Waiting(ticket, worker, index))

    def grant_devices(self) -> None:
        """Let each test run that has enough devices, and that no earlier one is ahead of."""
        for request in list(self.waiting):
            ticket = request.ticket
            tickets = [other.ticket for other in self.waiting]
            if ticket.count > len(self.free) or ahead(ticket, tickets):
                continue
            self.waiting.remove(request)
            taken = sorted(self.free)[: ticket.count]
            self.free.difference_update(taken)
            end = self.time + self.seconds_of(request.index)
            running = Running(end, ticket.number, request.worker, request.index, taken)
            heapq.heappush(self.running, running)

    def seconds_of(self, index: int) -> float:
        """Return how long a test takes; an ordinary one takes no time."""
        demand = self.demands.get(index)
        if demand is None:
            return 0.0
        return demand.expected()

    def end_test(self) -> None:
        """End the test that ends first."""
        ended = heapq.heappop(self.running)
        self.time = ended.end
        self.free.update(ended.devices)
        ended.worker.busy = False
        ended.worker.done.append(ended.index)
        self.scheduler.mark_test_complete(ended.worker, ended.index, 0.0)


Start = Callable[..., Play]


@pytest.fixture
def start(pytester: pytest.Pytester) -> Start:
    """All workers have collected, and the scheduler has begun."""

    def begin(tests: int, workers: int, plan: Plan, *more: str) -> Play:
        config = pytester.parseconfig("--dist=load", f"--tx={workers}*popen", *more)
        scheduler: Any = PackedScheduling(config, None, plan)
        made = [Worker(f"gw{number}") for number in range(workers)]
        collect(scheduler, made, tests)
        assert scheduler.collection_is_completed
        scheduler.schedule()
        return Play(scheduler, made, {})

    return begin


def collect(scheduler: Any, workers: Sequence[Worker], tests: int) -> None:
    """Tell the scheduler that these workers have collected as many tests."""
    for worker in workers:
        scheduler.add_node(worker)
    names = [f"test_{number}" for number in range(tests)]
    for worker in workers:
        scheduler.add_node_collection(worker, names)


Plan = Callable[[Sequence[str], int], Units]


def planned(*units: list[int]) -> Plan:
    """Return a plan of these units, whatever is collected."""
    return lambda collection, workers: list(units)


plan_nothing = planned()


def forty(seed: int) -> dict[int, Demand]:
    chance = random.Random(seed)
    demands = {}
    for number in range(40):
        world_size = chance.choice((1, 2, 4))
        seconds = chance.uniform(5, 60)
        demands[number] = Demand(str(number), world_size, seconds)
    return demands


def in_order_of(demands: Sequence[Demand]) -> Plan:
    units = [[int(demand.id)] for demand in demands]
    return planned(*units)


@pytest.mark.parametrize("seed", range(10))
def test_forty_tests_on_eight_gpus_end_near_the_ideal_and_when_the_simulation_says(seed: int, start: Start) -> None:
    demands = forty(seed)
    order = pack(demands.values(), DEVICES, 8)
    play = start(40, 8, in_order_of(order))
    play.demands = demands
    play.run()
    assert sorted(play.began) == list(range(40))
    schedule = simulate(order, DEVICES, 8)
    assert play.time == pytest.approx(schedule.makespan)
    assert play.time <= 1.15 * ideal(demands.values(), DEVICES, 8)


def test_xdists_own_order_takes_longer(start: Start) -> None:
    """The broken twin: nothing is planned."""
    play = start(40, 8, plan_nothing)
    play.demands = forty(1)
    play.run()
    assert play.time > 1.15 * ideal(play.demands.values(), DEVICES, 8)


def test_the_items_of_a_group_run_on_one_worker_in_a_row(start: Start) -> None:
    units = [[3, 4, 5, 6], [10, 12, 14], [0], [1, 2], [7, 8, 9]]
    play = start(20, 2, planned(*units)).run()
    for unit in units:
        (worker,) = workers_of(unit, play)
        place = worker.done.index(unit[0])
        assert worker.done[place : place + len(unit)] == unit
    assert sorted(play.began) == list(range(20))
    without = start(20, 2, plan_nothing).run()
    numbers = [len(workers_of(unit, without)) for unit in units]
    assert max(numbers) > 1


def workers_of(unit: list[int], play: Play) -> list[Worker]:
    """Return the workers that have run a test of this unit."""
    return [worker for worker in play.workers if not set(unit).isdisjoint(worker.done)]


def test_ordinary_tests_come_last_in_their_order(start: Start) -> None:
    play = start(30, 1, planned([20], [5])).run()
    others = [*range(5), *range(6, 20), *range(21, 30)]
    assert play.workers[0].done == [20, 5, *others]


def test_the_users_chunks_are_for_ordinary_tests(start: Start) -> None:
    play = start(40, 2, planned([39], [38], [37], [36]), "--maxschedchunk=5")
    first, second = play.workers
    assert list(first.queue) == [39, 37, 0, 1, 2, 3, 4]
    assert list(second.queue) == [38, 36, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_without_tests_on_ranks_xdist_schedules_as_usual(workers: int, start: Start) -> None:
    from xdist.scheduler import LoadScheduling

    play = start(25, workers, plan_nothing)
    own = LoadScheduling(play.scheduler.config)
    theirs = [Worker(worker.name) for worker in play.workers]
    collect(own, theirs, 25)
    own.schedule()
    for worker, expected in zip(play.workers, theirs, strict=True):
        assert worker.queue == expected.queue


@pytest.mark.parametrize("tests", [1, 2, 5, 9])
def test_fewer_tests_than_workers_are_all_run(tests: int, start: Start) -> None:
    units = [[number] for number in range(tests)]
    play = start(tests, 5, planned(*units)).run()
    assert sorted(play.began) == list(range(tests))
    assert play.scheduler.tests_finished


def test_a_test_that_kills_its_worker_is_not_run_again_and_the_rest_of_its_unit_is(start: Start) -> None:
    play = start(8, 2, planned([0, 1, 2], [3, 4, 5], [6], [7]))
    dead = play.workers.pop(0)
    assert dead.next_test() == 0
    assert play.scheduler.remove_node(dead) == "test_0"
    replacement = Worker("gw2")
    play.workers.append(replacement)
    collect(play.scheduler, [replacement], 8)
    play.scheduler.schedule()
    play.run()
    assert sorted(play.began) == [1, 2, 3, 4, 5, 6, 7]


def test_workers_with_different_collections_are_reported_by_xdist(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig("--dist=load", "--tx=2*popen")
    collected: list[Any] = []
    # pluggy reads the argument's name.
    config.pluginmanager.register(SimpleNamespace(pytest_collectreport=lambda report: collected.append(report)))  # noqa: PLW0108
    scheduler: Any = PackedScheduling(config, None, lambda collection, workers: pytest.fail("planned"))
    first = Worker("gw0")
    second = Worker("gw1")
    scheduler.add_node(first)
    scheduler.add_node(second)
    scheduler.add_node_collection(first, ["test_a", "test_b"])
    scheduler.add_node_collection(second, ["test_b", "test_a"])
    scheduler.schedule()
    (report,) = collected
    assert "Different tests were collected" in report.longrepr
    assert not first.queue
