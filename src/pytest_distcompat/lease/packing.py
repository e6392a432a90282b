"""In which order to ask for leases, so that the devices are busy; and how long that takes, on made-up devices.

Workers take tests in the order of a list, and a request waits for those before it. So large groups go first, and of each
size the longest: what is large starts while whole blocks of devices are free, what is small and short evens out the end.
Where that would start a long test of few ranks too late, another order is better. So a few are tried on made-up devices, the
one that is over first is taken, and tests in it are moved as long as that ends it earlier.
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

#: What an item is taken to last where nothing is known of any, in seconds.
UNKNOWN = 1.0
#: How many tests an xdist worker has in hand: the one that runs and the next, which its teardown needs to know
#: (``--dist load --maxschedchunk 1``; https://pytest-xdist.readthedocs.io/en/stable/distribution.html).
IN_HAND = 2


@dataclass(frozen=True)
class Demand:
    """What a test asks for: so many devices for so many seconds; None where nobody knows how long it lasts.

    ``items`` says of how many it consists that one worker runs in a row: the checks of a suite's cell are one demand.
    """

    id: str
    world_size: int
    seconds: float | None = None
    items: int = 1

    def expected(self, otherwise: float = UNKNOWN) -> float:
        """Its seconds, or so many for each item where nobody knows."""
        return otherwise * self.items if self.seconds is None else self.seconds


@dataclass(frozen=True)
class Schedule:
    """Who has which device when, and when all is over, in seconds; no order could be over before ``ideal``."""

    ids: tuple[str, ...]
    spans: tuple[Span, ...]
    makespan: float
    ideal: float


#: The orders to try, by what goes first.
_ORDERS: tuple[Callable[[Demand], tuple[float, ...]], ...] = (
    lambda demand: (demand.world_size, demand.expected()),
    lambda demand: (demand.world_size * demand.expected(),),
    lambda demand: (demand.expected(), demand.world_size),
)


#: How often to move a test. 40 tests get within 7 % of the ideal by that, in some 30 ms.
_MOVES = 100
#: So many demands are not worth it: of many small ones each order is a good one.
_MANY = 300


def pack(demands: Iterable[Demand], devices: int, workers: int, *, in_hand: int = IN_HAND) -> list[Demand]:
    """The demands in the order in which workers should take them, each with the seconds that it is expected to last."""
    asked = list(demands)

    def over(order: Sequence[Demand]) -> float:
        return simulate(order, devices, workers, in_hand=in_hand).makespan

    best = min((sorted(expect(asked), key=key, reverse=True) for key in _ORDERS), key=over)
    # Where nobody knows how long anything lasts, there is nothing to be gained by precision.
    guessed = all(demand.seconds is None for demand in asked)
    return best if guessed or len(best) > _MANY else _improved(best, over)


def _improved(order: list[Demand], over: Callable[[Sequence[Demand]], float]) -> list[Demand]:
    """That order with tests moved here and there, if it is ``over`` no later; the same for the same demands."""
    chance, best, least = random.Random(0), order, over(order)  # noqa: S311 - no secret
    for _ in range(_MOVES if len(order) > 1 else 0):
        moved = list(best)
        here, there = chance.sample(range(len(moved)), 2)
        moved.insert(there, moved.pop(here))
        end = over(moved)
        if end <= least:
            best, least = moved, end
    return best


def expect(demands: Sequence[Demand]) -> list[Demand]:
    """The same demands; an item that nobody knows lasts as the median of its world size, or of all sizes, or UNKNOWN seconds."""
    known: dict[int, list[float]] = {}
    for demand in demands:
        if demand.seconds is not None:
            known.setdefault(demand.world_size, []).append(demand.seconds / demand.items)
    usual = {size: statistics.median(seconds) for size, seconds in known.items()}
    otherwise = statistics.median(itertools.chain(*known.values()) if known else [UNKNOWN])
    return [replace(demand, seconds=demand.expected(usual.get(demand.world_size, otherwise))) for demand in demands]


def ideal(demands: Iterable[Demand], devices: int, workers: int) -> float:
    """Seconds that no order undercuts: all devices always busy, or all workers, or the longest test alone."""
    all_of_them = [(min(demand.world_size, devices), demand.expected()) for demand in demands]
    area = sum(size * seconds for size, seconds in all_of_them)
    alone = [seconds for _, seconds in all_of_them]
    return max([area / devices, sum(alone) / workers, *alone])


def simulate(demands: Iterable[Demand], devices: int, workers: int, *, in_hand: int = IN_HAND) -> Schedule:
    """What comes of that order on so many made-up devices, by the rule of the real queue (``tickets.ahead``)."""
    known = expect(list(demands))
    ids = tuple(f"gpu-{number}" for number in range(devices))
    to_come, free, time = deque(known), set(ids), 0.0
    hands: list[deque[Demand]] = [deque() for _ in range(workers)]
    # Dealt like cards, so that what is first in the list begins first.
    for hand in hands * in_hand:
        if to_come:
            hand.append(to_come.popleft())
    asks = list(range(workers))  # the workers that are about to begin with the next in their hand
    waiting: list[tuple[Ticket, int, float]] = []
    running: list[tuple[float, int, int, tuple[str, ...]]] = []
    spans: list[Span] = []
    number = 0
    while True:
        for worker in asks:
            if to_come and len(hands[worker]) < in_hand:
                hands[worker].append(to_come.popleft())
            if hands[worker]:
                number += 1
                demand = hands[worker][0]
                waiting.append((Ticket(number, ids, min(demand.world_size, devices), demand.id), worker, time))
        for request in list(waiting):
            ticket, worker, asked = request
            if ticket.count <= len(free) and not ahead(ticket, (other for other, _, _ in waiting)):
                waiting.remove(request)
                taken = tuple([name for name in ids if name in free][: ticket.count])
                free.difference_update(taken)
                end = time + hands[worker][0].expected()
                heapq.heappush(running, (end, ticket.number, worker, taken))
                spans.append(Span(taken, ticket.who, worker, _at(asked), _at(time), _at(end), worker=str(worker)))
        if not running:
            return Schedule(ids, tuple(spans), time, ideal(known, devices, workers))
        time, _, worker, taken = heapq.heappop(running)
        free.update(taken)
        hands[worker].popleft()
        asks = [worker]


def _at(time: float) -> Instant:
    return Instant(time, time)
