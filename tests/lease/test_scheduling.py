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
        if self.busy or not self.queue or (len(self.queue) == 1 and not self.shutting_down):
            return None
        self.busy = True
        return self.queue.popleft()


@dataclass
class Play:
    """A session: what each test asks for, by its place; nothing, for an ordinary one."""

    scheduler: Any
    workers: list[Worker]
    demands: Mapping[int, Demand]
    began: list[int] = field(default_factory=list)
    time: float = 0.0

    def run(self) -> Play:
        """Until nothing happens any more."""
        free, number = set(IDS), 0
        waiting: list[tuple[Ticket, Worker, int]] = []
        running: list[tuple[float, int, Worker, int, list[str]]] = []
        while True:
            for worker in self.workers:
                index = worker.next_test()
                if index is not None:
                    number += 1
                    self.began.append(index)
                    size = self.demands[index].world_size if index in self.demands else 0
                    waiting.append((Ticket(number, IDS if size else (), size, str(index)), worker, index))
            for request in list(waiting):
                ticket, worker, index = request
                if ticket.count <= len(free) and not ahead(ticket, (other for other, _, _ in waiting)):
                    waiting.remove(request)
                    taken = sorted(free)[: ticket.count]
                    free.difference_update(taken)
                    lasts = self.demands[index].expected() if index in self.demands else 0.0
                    heapq.heappush(running, (self.time + lasts, ticket.number, worker, index, taken))
            if not running:
                return self
            self.time, _, worker, index, taken = heapq.heappop(running)
            free.update(taken)
            worker.busy = False
            worker.done.append(index)
            self.scheduler.mark_test_complete(worker, index, 0.0)


Start = Callable[..., Play]


@pytest.fixture
def start(pytester: pytest.Pytester) -> Start:
    """All workers have collected, and the scheduler has begun."""

    def begin(tests: int, workers: int, plan: Callable[[Sequence[str], int], Units], *more: str) -> Play:
        config = pytester.parseconfig("--dist=load", f"--tx={workers}*popen", *more)
        scheduler: Any = PackedScheduling(config, None, plan)
        made = [Worker(f"gw{number}") for number in range(workers)]
        for worker in made:
            scheduler.add_node(worker)
        for worker in made:
            scheduler.add_node_collection(worker, [f"test_{number}" for number in range(tests)])
        assert scheduler.collection_is_completed
        scheduler.schedule()
        return Play(scheduler, made, {})

    return begin


def forty(seed: int) -> dict[int, Demand]:
    chance = random.Random(seed)
    return {number: Demand(str(number), chance.choice((1, 2, 4)), chance.uniform(5, 60)) for number in range(40)}


def in_order_of(demands: Sequence[Demand]) -> Callable[[Sequence[str], int], Units]:
    return lambda collection, workers: [[int(demand.id)] for demand in demands]


@pytest.mark.parametrize("seed", range(10))
def test_forty_tests_on_eight_gpus_end_near_the_ideal_and_when_the_simulation_says(seed: int, start: Start) -> None:
    demands = forty(seed)
    order = pack(demands.values(), DEVICES, 8)
    play = start(40, 8, in_order_of(order))
    play.demands = demands
    assert sorted(play.run().began) == list(range(40))
    assert play.time == pytest.approx(simulate(order, DEVICES, 8).makespan)
    assert play.time <= 1.15 * ideal(demands.values(), DEVICES, 8)


def test_xdists_own_order_takes_longer(start: Start) -> None:
    """The broken twin: nothing is planned."""
    play = start(40, 8, lambda collection, workers: [])
    play.demands = forty(1)
    assert play.run().time > 1.15 * ideal(play.demands.values(), DEVICES, 8)


def test_the_items_of_a_group_run_on_one_worker_in_a_row(start: Start) -> None:
    units = [[3, 4, 5, 6], [10, 12, 14], [0], [1, 2], [7, 8, 9]]
    play = start(20, 2, lambda collection, workers: units).run()
    for unit in units:
        (worker,) = [worker for worker in play.workers if set(unit) & set(worker.done)]
        place = worker.done.index(unit[0])
        assert worker.done[place : place + len(unit)] == unit
    assert sorted(play.began) == list(range(20))
    without = start(20, 2, lambda collection, workers: []).run()
    assert any(len([worker for worker in without.workers if set(unit) & set(worker.done)]) > 1 for unit in units)


def test_ordinary_tests_come_last_in_their_order(start: Start) -> None:
    play = start(30, 1, lambda collection, workers: [[20], [5]]).run()
    assert play.workers[0].done == [20, 5, *(number for number in range(30) if number not in {5, 20})]


def test_the_users_chunks_are_for_ordinary_tests(start: Start) -> None:
    play = start(40, 2, lambda collection, workers: [[39], [38], [37], [36]], "--maxschedchunk=5")
    assert [list(worker.queue) for worker in play.workers] == [[39, 37, *range(5)], [38, 36, *range(5, 10)]]


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_without_tests_on_ranks_xdist_schedules_as_usual(workers: int, start: Start) -> None:
    from xdist.scheduler import LoadScheduling

    play = start(25, workers, lambda collection, workers: [])
    own = LoadScheduling(play.scheduler.config)
    theirs = [Worker(worker.name) for worker in play.workers]
    for worker in theirs:
        own.add_node(worker)
    for worker in theirs:
        own.add_node_collection(worker, [f"test_{number}" for number in range(25)])
    own.schedule()
    assert [worker.queue for worker in play.workers] == [worker.queue for worker in theirs]


@pytest.mark.parametrize("tests", [1, 2, 5, 9])
def test_fewer_tests_than_workers_are_all_run(tests: int, start: Start) -> None:
    play = start(tests, 5, lambda collection, workers: [[number] for number in range(tests)]).run()
    assert sorted(play.began) == list(range(tests))
    assert play.scheduler.tests_finished


def test_a_test_that_kills_its_worker_is_not_run_again_and_the_rest_of_its_unit_is(start: Start) -> None:
    play = start(8, 2, lambda collection, workers: [[0, 1, 2], [3, 4, 5], [6], [7]])
    dead = play.workers.pop(0)
    assert dead.next_test() == 0
    assert play.scheduler.remove_node(dead) == "test_0"
    replacement = Worker("gw2")
    play.workers.append(replacement)
    play.scheduler.add_node(replacement)
    play.scheduler.add_node_collection(replacement, [f"test_{number}" for number in range(8)])
    play.scheduler.schedule()
    assert sorted(play.run().began) == [1, 2, 3, 4, 5, 6, 7]


def test_workers_with_different_collections_are_reported_by_xdist(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig("--dist=load", "--tx=2*popen")
    collected: list[Any] = []
    # pluggy reads the argument's name.
    config.pluginmanager.register(SimpleNamespace(pytest_collectreport=lambda report: collected.append(report)))  # noqa: PLW0108
    scheduler: Any = PackedScheduling(config, None, lambda collection, workers: pytest.fail("planned"))
    made = [Worker("gw0"), Worker("gw1")]
    for worker in made:
        scheduler.add_node(worker)
    scheduler.add_node_collection(made[0], ["test_a", "test_b"])
    scheduler.add_node_collection(made[1], ["test_b", "test_a"])
    scheduler.schedule()
    assert len(collected) == 1
    assert "Different tests were collected" in collected[0].longrepr
    assert not made[0].queue
