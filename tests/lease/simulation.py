"""Simulation of leases: what becomes of an order of tests, by the rule of the real queue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True)
class Request:
    """A worker that waits for devices since a time."""

    ticket: Ticket
    worker: int
    requested: float


class Lease(NamedTuple):
    """Devices that a worker has until its test ends; leases that end first sort first."""

    end: float
    number: int
    worker: int
    devices: tuple[str, ...]


def simulate(
    demands: Iterable[Demand], devices: int, workers: int, *, in_hand: int = IN_HAND, nodes: int = 1
) -> Schedule:
    """Simulate the leases of that order, by the rule of the real queue (``tickets.ahead``).

    ``devices`` and ``workers`` are those of each node; a worker leases on its own node.
    """
    known = expect(list(demands))
    session = Session(known, devices, workers, in_hand, nodes)
    session.run()
    lower_bound = ideal(known, nodes * devices, nodes * workers)
    return Schedule(session.ids, tuple(session.spans), session.time, lower_bound)


class Session:
    """The state of a simulated session: which tests are to come, in hand, waiting and running."""

    def __init__(self, demands: Iterable[Demand], devices: int, workers: int, in_hand: int, nodes: int) -> None:
        self.ids = tuple(f"gpu-{number}" for number in range(nodes * devices))
        self.spans: list[Span] = []
        self.time = 0.0
        self._to_come = deque(demands)
        self._devices = devices
        self._workers = nodes * workers
        self._in_hand = in_hand
        self._nodes = nodes
        self._free = set(self.ids)
        self._tests_in_hand: list[deque[Demand]] = [deque() for _ in range(self._workers)]
        self._requests: list[list[Request]] = [[] for _ in range(nodes)]
        self._running: list[Lease] = []
        self._requested = 0

    def run(self) -> None:
        """Run all tests."""
        self._deal()
        idle = list(range(self._workers))
        while True:
            for worker in idle:
                self._request(worker)
            # Devices were given back on nodes of idle workers alone.
            for node in sorted({worker % self._nodes for worker in idle}):
                self._grant(node)
            if not self._running:
                return
            idle = [self._finish()]

    def _deal(self) -> None:
        """Deal the first tests in turn, so that the first tests of the list begin first."""
        for tests in self._tests_in_hand * self._in_hand:
            if self._to_come:
                tests.append(self._to_come.popleft())

    def _request(self, worker: int) -> None:
        """Request devices for the next test of a worker, which gets one test more in hand."""
        tests = self._tests_in_hand[worker]
        if self._to_come and len(tests) < self._in_hand:
            tests.append(self._to_come.popleft())
        if not tests:
            return
        self._requested += 1
        demand = tests[0]
        node = worker % self._nodes
        first = node * self._devices
        of_node = self.ids[first : first + self._devices]
        count = min(demand.world_size, self._devices)
        ticket = Ticket(self._requested, of_node, count, demand.id)
        self._requests[node].append(Request(ticket, worker, self.time))

    def _grant(self, node: int) -> None:
        """Lease free devices to each request of a node that no other is ahead of."""
        requests = self._requests[node]
        for request in list(requests):
            ticket = request.ticket
            free = [device for device in ticket.ids if device in self._free]
            earlier = ahead(ticket, (other.ticket for other in requests))
            if ticket.count <= len(free) and not earlier:
                requests.remove(request)
                self._lease(request, tuple(free[: ticket.count]))

    def _lease(self, request: Request, devices: tuple[str, ...]) -> None:
        worker = request.worker
        demand = self._tests_in_hand[worker][0]
        end = self.time + demand.expected()
        self._free.difference_update(devices)
        heapq.heappush(self._running, Lease(end, request.ticket.number, worker, devices))
        span = Span(devices, demand.id, worker, request.requested, self.time, end, worker=str(worker))
        self.spans.append(span)

    def _finish(self) -> int:
        """Go on to the end of the next lease; return its worker."""
        lease = heapq.heappop(self._running)
        self.time = lease.end
        self._free.update(lease.devices)
        self._tests_in_hand[lease.worker].popleft()
        return lease.worker
