"""Simulation of leases: what becomes of an order of tests, by the rule of the real queue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_distcompat.lease import Demand, Instant, Span
from pytest_distcompat.lease.packing import expect, ideal
from pytest_distcompat.lease.tickets import Ticket, ahead
from pytest_distcompat.plugin.marked.packed import IN_HAND


@dataclass(frozen=True)
class Schedule:
    """Simulated leases: ``makespan`` is the end of the last one in seconds, ``ideal`` a lower bound for every order."""

    ids: tuple[str, ...]
    spans: tuple[Span, ...]
    makespan: float
    ideal: float


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
