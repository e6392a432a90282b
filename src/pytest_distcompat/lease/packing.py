"""In which order to ask for leases, so that the devices are busy; and how long that takes, on made-up devices.

Workers take tests in the order of a list, and a request waits for those before it. So large groups go first, and of each
size the longest: what is large starts while whole blocks of devices are free, what is small and short evens out the end.
Where that would start a long test of few ranks too late, another order is better. So a few are tried on made-up devices, and
the one that is over first is taken.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_distcompat.lease.tickets import Ticket, ahead
from pytest_distcompat.lease.timeline import Instant, Span

#: What a test is taken to last where nothing is known of any, in seconds.
UNKNOWN = 1.0
#: How many tests an xdist worker has in hand: the one that runs and the next, which its teardown needs to know
#: (``--dist load --maxschedchunk 1``; https://pytest-xdist.readthedocs.io/en/stable/distribution.html).
IN_HAND = 2


@dataclass(frozen=True)
class Demand:
    """What a test asks for: so many devices for so many seconds; None where nobody knows how long it lasts."""

    id: str
    world_size: int
    seconds: float | None = None

    def expected(self, otherwise: float = UNKNOWN) -> float:
        """Its seconds, or so many where nobody knows."""
        return otherwise if self.seconds is None else self.seconds


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


def pack(demands: Iterable[Demand], devices: int, workers: int, *, in_hand: int = IN_HAND) -> list[Demand]:
    """The demands in the order in which workers should take them, each with the seconds that it is expected to last."""
    known = expect(list(demands))
    orders = [sorted(known, key=key, reverse=True) for key in _ORDERS]
    return min(orders, key=lambda order: simulate(order, devices, workers, in_hand=in_hand).makespan)


def expect(demands: Sequence[Demand]) -> list[Demand]:
    """The same demands; what nobody knows lasts as the median of its world size, or of all sizes, or UNKNOWN seconds."""
    known: dict[int, list[float]] = {}
    for demand in demands:
        if demand.seconds is not None:
            known.setdefault(demand.world_size, []).append(demand.seconds)
    usual = {size: statistics.median(seconds) for size, seconds in known.items()}
    otherwise = statistics.median(itertools.chain(*known.values()) if known else [UNKNOWN])
    return [replace(demand, seconds=demand.expected(usual.get(demand.world_size, otherwise))) for demand in demands]


def ideal(demands: Iterable[Demand], devices: int) -> float:
    """Seconds that no order undercuts: all devices always busy, or the longest test alone."""
    all_of_them = [(min(demand.world_size, devices), demand.expected()) for demand in demands]
    area = sum(size * seconds for size, seconds in all_of_them)
    return max([area / devices, *(seconds for _, seconds in all_of_them)])


def simulate(demands: Iterable[Demand], devices: int, workers: int, *, in_hand: int = IN_HAND) -> Schedule:
    """What comes of that order on so many made-up devices, by the rule of the real queue (``tickets.ahead``)."""
    known = expect(list(demands))
    ids = tuple(f"gpu-{number}" for number in range(devices))
    to_come, free, time = deque(known), set(ids), 0.0
    hands: list[deque[Demand]] = [deque() for _ in range(workers)]
    asks = list(range(workers))  # the workers that are about to begin with the next in their hand
    waiting: list[tuple[Ticket, int, float]] = []
    running: list[tuple[float, int, int, tuple[str, ...]]] = []
    spans: list[Span] = []
    number = 0
    while True:
        for worker in asks:
            while to_come and len(hands[worker]) < in_hand:
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
                spans.append(Span(taken, ticket.who, worker, _at(asked), _at(time), _at(end)))
        if not running:
            return Schedule(ids, tuple(spans), time, ideal(known, devices))
        time, _, worker, taken = heapq.heappop(running)
        free.update(taken)
        hands[worker].popleft()
        asks = [worker]


def _at(time: float) -> Instant:
    return Instant(time, time)
