"""Simulation of leases: what becomes of an order of tests, by the rule of the real queue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_distcompat.lease import Demand, Span
from pytest_distcompat.lease.packing import expect, ideal
from pytest_distcompat.lease.tickets import Ticket, ahead
from pytest_distcompat.plugin.packed import IN_HAND


@dataclass(frozen=True)
class Schedule:
    """Simulated leases: ``makespan`` is the end of the last one in seconds, ``ideal`` a lower bound for every order."""

    ids: tuple[str, ...]
    spans: tuple[Span, ...]
    makespan: float
    ideal: float


def simulate(
    demands: Iterable[Demand], devices: int, workers: int, *, in_hand: int = IN_HAND, nodes: int = 1
) -> Schedule:
    """Simulate the leases of that order, by the rule of the real queue (``tickets.ahead``).

    ``devices`` and ``workers`` are those of each node; a worker leases on its own node.
    """
    known = expect(list(demands))
    ids = tuple(f"gpu-{number}" for number in range(nodes * devices))
    own = [ids[node * devices : (node + 1) * devices] for node in range(nodes)]
    to_come, free, time = deque(known), set(ids), 0.0
    hands: list[deque[Demand]] = [deque() for _ in range(nodes * workers)]
    # Dealt in turn, so that the first tests of the list begin first.
    for hand in hands * in_hand:
        if to_come:
            hand.append(to_come.popleft())
    idle = list(range(nodes * workers))  # the workers that are about to request devices for their next test
    waiting: list[list[tuple[Ticket, int, float]]] = [[] for _ in own]
    running: list[tuple[float, int, int, tuple[str, ...]]] = []
    spans: list[Span] = []
    number = 0
    while True:
        for worker in idle:
            if to_come and len(hands[worker]) < in_hand:
                hands[worker].append(to_come.popleft())
            if hands[worker]:
                number += 1
                demand, node = hands[worker][0], worker % nodes
                ticket = Ticket(number, own[node], min(demand.world_size, devices), demand.id)
                waiting[node].append((ticket, worker, time))
        # Devices were given back on nodes of idle workers alone.
        for requests in (waiting[node] for node in {worker % nodes for worker in idle}):
            for request in list(requests):
                ticket, worker, requested = request
                unused = [name for name in ticket.ids if name in free]
                if ticket.count <= len(unused) and not ahead(ticket, (other for other, _, _ in requests)):
                    requests.remove(request)
                    taken = tuple(unused[: ticket.count])
                    free.difference_update(taken)
                    end = time + hands[worker][0].expected()
                    heapq.heappush(running, (end, ticket.number, worker, taken))
                    spans.append(Span(taken, ticket.who, worker, requested, time, end, worker=str(worker)))
        if not running:
            return Schedule(ids, tuple(spans), time, ideal(known, nodes * devices, nodes * workers))
        time, _, worker, taken = heapq.heappop(running)
        free.update(taken)
        hands[worker].popleft()
        idle = [worker]
