"""Order of tests that keeps the devices busy, found by simulating the leases.

Workers take tests in the order of a list, and a request waits for those before it. So large groups go first, and of each size
the longest: large groups start while many devices are free, and small, short ones fill the gaps at the end. If that starts a
long test of few ranks too late, another order is better. So a few orders are simulated, the one that ends first is taken, and
tests in it are moved while that makes the end earlier.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_distcompat.lease.tickets import Ticket, ahead
from pytest_distcompat.lease.timeline import Instant, Span

#: The assumed duration of an item if no duration is known, in seconds.
UNKNOWN = 1.0
#: How many tests an xdist worker has at a time: the one that runs, and the next one, which its teardown needs to know
#: (``--dist load --maxschedchunk 1``; https://pytest-xdist.readthedocs.io/en/stable/distribution.html).
IN_HAND = 2


@dataclass(frozen=True)
class Demand:
    """Devices and time that a test needs.

    Attributes:
        id: Names the test.
        world_size: How many devices.
        seconds: How long, None if unknown.
        items: How many pytest items one worker runs in a row for it: the checks of a suite's cell are one demand.

    """

    id: str
    world_size: int
    seconds: float | None = None
    items: int = 1

    def expected(self, otherwise: float = UNKNOWN) -> float:
        """Return its seconds, or ``otherwise`` for each item if they are unknown."""
        return otherwise * self.items if self.seconds is None else self.seconds


@dataclass(frozen=True)
class Schedule:
    """Simulated leases: ``makespan`` is the end of the last one in seconds, ``ideal`` a lower bound for every order."""

    ids: tuple[str, ...]
    spans: tuple[Span, ...]
    makespan: float
    ideal: float


#: Sort keys of the orders to try; the largest goes first.
_ORDERS: tuple[Callable[[Demand], tuple[float, ...]], ...] = (
    lambda demand: (demand.world_size, demand.expected()),
    lambda demand: (demand.world_size * demand.expected(),),
    lambda demand: (demand.expected(), demand.world_size),
)


#: How often a test is moved. With 100 moves 40 tests get within 7 % of the ideal, in some 30 ms.
_MOVES = 100
#: Above this number of demands no test is moved: with many small ones each order is good.
_MANY = 300


def pack(demands: Iterable[Demand], devices: int, workers: int, *, in_hand: int = IN_HAND) -> list[Demand]:
    """Return the demands in the order in which workers should take them, each with its expected duration."""
    unordered = list(demands)

    def makespan(order: Sequence[Demand]) -> float:
        return simulate(order, devices, workers, in_hand=in_hand).makespan

    best = min((sorted(expect(unordered), key=key, reverse=True) for key in _ORDERS), key=makespan)
    # If all durations are guesses, more precision gains nothing.
    guessed = all(demand.seconds is None for demand in unordered)
    return best if guessed or len(best) > _MANY else _improved(best, makespan)


def _improved(order: list[Demand], makespan: Callable[[Sequence[Demand]], float]) -> list[Demand]:
    """Return the order with single tests moved while it does not end later; deterministic."""
    chance, best, least = random.Random(0), order, makespan(order)  # noqa: S311 - no secret
    for _ in range(_MOVES if len(order) > 1 else 0):
        moved = list(best)
        source, destination = chance.sample(range(len(moved)), 2)
        moved.insert(destination, moved.pop(source))
        end = makespan(moved)
        if end <= least:
            best, least = moved, end
    return best


def expect(demands: Sequence[Demand]) -> list[Demand]:
    """Return the demands with durations: unknown ones get the median of their world size, of all, or ``UNKNOWN`` seconds."""
    known: dict[int, list[float]] = {}
    for demand in demands:
        if demand.seconds is not None:
            known.setdefault(demand.world_size, []).append(demand.seconds / demand.items)
    usual = {size: statistics.median(seconds) for size, seconds in known.items()}
    otherwise = statistics.median(itertools.chain(*known.values()) if known else [UNKNOWN])
    return [replace(demand, seconds=demand.expected(usual.get(demand.world_size, otherwise))) for demand in demands]


def ideal(demands: Iterable[Demand], devices: int, workers: int) -> float:
    """Return a lower bound of the makespan in seconds: all devices always busy, all workers, or the longest test alone."""
    all_of_them = [(min(demand.world_size, devices), demand.expected()) for demand in demands]
    area = sum(size * seconds for size, seconds in all_of_them)
    alone = [seconds for _, seconds in all_of_them]
    return max([area / devices, sum(alone) / workers, *alone])


def simulate(demands: Iterable[Demand], devices: int, workers: int, *, in_hand: int = IN_HAND) -> Schedule:
    """Simulate the leases of that order, by the rule of the real queue (``tickets.ahead``)."""
    known = expect(list(demands))
    ids = tuple(f"gpu-{number}" for number in range(devices))
    to_come, free, time = deque(known), set(ids), 0.0
    hands: list[deque[Demand]] = [deque() for _ in range(workers)]
    # Dealt in turn, so that the first tests of the list begin first.
    for hand in hands * in_hand:
        if to_come:
            hand.append(to_come.popleft())
    idle = list(range(workers))  # the workers that are about to request devices for their next test
    waiting: list[tuple[Ticket, int, float]] = []
    running: list[tuple[float, int, int, tuple[str, ...]]] = []
    spans: list[Span] = []
    number = 0
    while True:
        for worker in idle:
            if to_come and len(hands[worker]) < in_hand:
                hands[worker].append(to_come.popleft())
            if hands[worker]:
                number += 1
                demand = hands[worker][0]
                waiting.append((Ticket(number, ids, min(demand.world_size, devices), demand.id), worker, time))
        for request in list(waiting):
            ticket, worker, requested = request
            if ticket.count <= len(free) and not ahead(ticket, (other for other, _, _ in waiting)):
                waiting.remove(request)
                taken = tuple([name for name in ids if name in free][: ticket.count])
                free.difference_update(taken)
                end = time + hands[worker][0].expected()
                heapq.heappush(running, (end, ticket.number, worker, taken))
                spans.append(Span(taken, ticket.who, worker, _at(requested), _at(time), _at(end), worker=str(worker)))
        if not running:
            return Schedule(ids, tuple(spans), time, ideal(known, devices, workers))
        time, _, worker, taken = heapq.heappop(running)
        free.update(taken)
        hands[worker].popleft()
        idle = [worker]


def _at(time: float) -> Instant:
    return Instant(time, time)
