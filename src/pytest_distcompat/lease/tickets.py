"""Queue of requests for devices: each ticket is a file that its owner keeps locked while it waits.

First come, first served. No ticket overtakes an earlier one that may take one of the same devices, so a large request is
served after those before it, however many small ones follow. Tickets of inventories without a common device do not affect
each other. A small request that would fit beside a waiting large one waits too; ``packing.py`` makes that rare, because it
starts with the large ones.

The operating system unlocks the file of a process that dies, which removes its ticket from the queue.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from pytest_distcompat import clock
from pytest_distcompat.decode import decode
from pytest_distcompat.lease.directory import QUEUE, FileLock, LeaseDirectory, TakenError

#: The interval in which a request checks its turn, in seconds.
POLL = 0.02
#: The interval for the lock around adding a ticket, which is held for well under a millisecond.
_POLL_JOINING = 0.002


@dataclass(frozen=True)
class Ticket:
    """Request for ``count`` of the devices ``ids``, by ``who``."""

    number: int
    ids: tuple[str, ...]
    count: int
    who: str
    pid: int = 0


#: Called repeatedly while a request waits, with its ticket if it has one.
Poll = Callable[[Ticket | None], None]


def ahead(mine: Ticket, others: Iterable[Ticket]) -> list[Ticket]:
    """Return the tickets to be served before ``mine``, of those that may take one of its devices; the next one first."""
    before = [other for other in others if other.number < mine.number and set(other.ids) & set(mine.ids)]
    return sorted(before, key=lambda ticket: ticket.number, reverse=True)


class Queue:
    """Tickets of all processes, as files of one directory. A waiting process restores its ticket if it is removed."""

    def __init__(self, directory: LeaseDirectory) -> None:
        self._directory = directory
        #: The locks of this process's own tickets, by their numbers.
        self._own: dict[int, FileLock] = {}

    @contextlib.contextmanager
    def turn(self, ids: tuple[str, ...], count: int, who: str, deadline: float, *, poll: Poll) -> Iterator[Ticket]:
        """Wait until the request is the next one, and keep its turn in the block. The arguments are as in ``Ticket``.

        Raises:
            TakenError: At ``deadline``, in monotonic seconds.
        """
        joining = self._await_lock(f"{QUEUE}/joining.lock", deadline, _POLL_JOINING, lambda: poll(None))
        with contextlib.ExitStack() as own, contextlib.ExitStack() as join:
            join.callback(joining.close)
            # All processes of a machine share this clock, so numbers grow and are never used twice, not even when a process
            # still waits for a ticket whose owner is gone.
            mine = Ticket(clock.now_ns(), ids, count, who, os.getpid())
            self._own[mine.number] = self._directory.lock(self._name(mine, "lock"))
            own.callback(lambda: self._own.pop(mine.number).close())
            # Before the lock is released.
            own.callback(self._remove, mine)
            # After the lock, because a visible ticket without a lock belongs to a dead process.
            self._directory.write(self._name(mine, "json"), json.dumps(asdict(mine)))
            join.close()
            self.await_turn(mine, deadline, poll)
            yield mine

    def overtaken(self, mine: Ticket) -> bool:
        """Tell whether another ticket is to be served first."""
        self._restore(mine)
        return bool(ahead(mine, self._tickets()))

    def await_turn(self, mine: Ticket, deadline: float, poll: Poll) -> None:
        """Wait until no other ticket is to be served first. Raises TakenError at the deadline."""

        def restore_and_poll() -> None:
            self._restore(mine)
            poll(mine)

        while before := ahead(mine, self._tickets()):
            self._await_end(before[0], deadline, restore_and_poll)
            self._restore(mine)

    def waiting(self) -> list[Ticket]:
        """Return the tickets whose owners are alive, in order."""
        return [ticket for ticket in self._tickets() if not self._ended(ticket)]

    def _restore(self, mine: Ticket) -> None:
        """Restore the ticket if it was removed, so that a later request cannot overtake it."""
        lock = self._own[mine.number]
        if not lock.in_place():
            # Another process that found the ticket unlocked is about to remove it: try again at the next call.
            with contextlib.suppress(TakenError):
                self._own[mine.number] = self._directory.lock(self._name(mine, "lock"))
                lock.close()
        if self._own[mine.number].in_place() and not (self._directory.path / self._name(mine, "json")).exists():
            self._directory.write(self._name(mine, "json"), json.dumps(asdict(mine)))

    def _await_end(self, other: Ticket, deadline: float, poll: Callable[[], None] = lambda: None) -> None:
        """Wait until the ticket's owner was served, gave up or died: then its lock is free."""
        with contextlib.closing(self._await_lock(self._name(other, "lock"), deadline, POLL, poll)):
            self._remove(other)

    def _ended(self, other: Ticket) -> bool:
        with contextlib.suppress(TakenError):
            self._await_end(other, 0.0)
            return True
        return False

    def _tickets(self) -> list[Ticket]:
        """Return all tickets in order, those of dead processes included."""
        tickets = []
        for text in self._directory.tickets():
            # It may be half written, or written by another version of this package with other fields.
            with contextlib.suppress(ValueError):
                tickets.append(decode(Ticket, json.loads(text)))
        return sorted(tickets, key=lambda ticket: ticket.number)

    def _remove(self, ticket: Ticket) -> None:
        for kind in ("json", "lock"):
            (self._directory.path / self._name(ticket, kind)).unlink(missing_ok=True)

    def _name(self, ticket: Ticket, kind: str) -> str:
        return f"{QUEUE}/{ticket.number}.{kind}"

    def _await_lock(self, name: str, deadline: float, interval: float, poll: Callable[[], None]) -> FileLock:
        """Wait for that lock and return it. Raises TakenError at the deadline."""
        while True:
            try:
                return self._directory.lock(name)
            except TakenError:
                if clock.now() >= deadline:
                    raise
            poll()
            clock.sleep(interval)
