"""Queue of requests for devices: each ticket is a file that its owner keeps locked while it waits.

``pool.Pool`` stands in the queue with ``Queue.ticket`` while it waits for devices, and asks
``overtaken`` many times a second whether another request is to be served first. The queue is a
directory that all processes of a user share: ``queue/N.json`` says what request N wants, and
``queue/N.lock`` is locked while its process waits.

First come, first served. No ticket overtakes an earlier one that may take one of the same devices,
so a large request is served after those before it, however many small ones follow. Two tickets
that no common device would do for do not affect each other. A small request that would fit beside
a waiting large one waits too; ``packing.py`` makes that rare, because it starts with the large
ones.

The operating system unlocks the file of a process that dies, which removes its ticket from the
queue.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from pytest_distcompat import clock
from pytest_distcompat.decode import decode
from pytest_distcompat.lease.directory import QUEUE, FileLock, LeaseDirectory, TakenError


@dataclass(frozen=True)
class Ticket:
    """Request for ``count`` of the devices ``ids``, by ``who``."""

    #: Its place in the queue: smaller numbers come first.
    number: int
    #: The devices of which any will do: ``("GPU-a", "GPU-b")``.
    ids: tuple[str, ...]
    #: How many of them it needs.
    count: int
    #: Names the request in messages: a test's id.
    who: str
    #: The process that waits; 0 if unknown.
    pid: int = 0


def ahead(mine: Ticket, others: Iterable[Ticket]) -> list[Ticket]:
    """Return the tickets to be served before ``mine``, the one just before it first.

    They are the earlier ones that may take one of its devices.
    """
    wanted = set(mine.ids)
    before = []
    for other in others:
        if other.number < mine.number and not wanted.isdisjoint(other.ids):
            before.append(other)
    return sorted(before, key=lambda ticket: ticket.number, reverse=True)


class Queue:
    """Tickets of all processes, as files of one directory.

    A waiting process restores its ticket if it is removed, as by somebody who cleans the directory.
    """

    def __init__(self, directory: LeaseDirectory) -> None:
        self._directory = directory
        #: The locks of this process's own tickets, by their numbers.
        self._own: dict[int, FileLock] = {}
        #: Number of an own ticket -> the ticket just before it, when last looked; None for none.
        self._ahead: dict[int, Ticket | None] = {}

    @contextlib.contextmanager
    def ticket(self, ids: tuple[str, ...], count: int, who: str) -> Iterator[Ticket]:
        """Have a request stand in the queue in the block. The arguments are as in ``Ticket``."""
        # Callbacks run in reverse order at the end of the block: the files are removed, then the
        # lock is released.
        with contextlib.ExitStack() as stack:
            # All processes of a machine share this clock, so numbers grow. The process number keeps
            # two apart that come in the same nanosecond.
            number = clock.now_ns() << 22 | os.getpid()
            mine = Ticket(number, ids, count, who, os.getpid())
            self._own[mine.number] = self._lock(mine)
            stack.callback(self._unlock, mine)
            stack.callback(self._ahead.pop, mine.number, None)
            # Before the lock is released.
            stack.callback(self._remove, mine)
            # After the lock, because a visible ticket without a lock belongs to a dead process.
            self._write(mine)
            yield mine

    def overtaken(self, mine: Ticket) -> bool:
        """Tell whether another ticket is to be served first."""
        self._restore(mine)
        last = self._ahead.get(mine.number)
        # While that one waits nobody reads the whole queue: all who wait ask many times a second.
        if last is None or self._ended(last):
            last = self._next_ahead(mine)
            self._ahead[mine.number] = last
        return last is not None

    def _next_ahead(self, mine: Ticket) -> Ticket | None:
        """Return the ticket just before this one whose owner still waits; None if there is none."""
        for other in ahead(mine, self._tickets()):
            if not self._ended(other):
                return other
        return None

    def waiting(self) -> list[Ticket]:
        """Return the tickets whose owners wait, in order; those of the dead are removed."""
        tickets: list[Ticket] = []
        for ticket in self._tickets():
            if not self._ended(ticket):
                tickets.append(ticket)
        return sorted(tickets, key=lambda ticket: ticket.number)

    def _tickets(self) -> list[Ticket]:
        """Return all tickets, those of dead processes included."""
        tickets = []
        for text in self._directory.tickets():
            # It may be half written, or written by another version of this package with other
            # fields.
            with contextlib.suppress(ValueError):
                fields = json.loads(text)
                tickets.append(decode(Ticket, fields))
        return tickets

    def _restore(self, mine: Ticket) -> None:
        """Restore the ticket if it was removed, so that a later request cannot overtake it."""
        lock = self._own[mine.number]
        # Unless the path still names the file that this process has locked.
        if not lock.in_place():
            # Another process that found the ticket unlocked is about to remove it: try again at the
            # next call.
            with contextlib.suppress(TakenError):
                self._own[mine.number] = self._lock(mine)
                lock.close()
        record = self._directory.path / self._name(mine, "json")
        if self._own[mine.number].in_place() and not record.exists():
            self._write(mine)

    def _ended(self, other: Ticket) -> bool:
        """Tell whether the ticket's owner was served, gave up or died: then its lock is free.

        The files of such a ticket are removed.
        """
        with contextlib.suppress(TakenError), contextlib.closing(self._lock(other)):
            self._remove(other)
            return True
        return False

    def _lock(self, ticket: Ticket) -> FileLock:
        """Lock a ticket. Raises TakenError if its owner waits."""
        return self._directory.lock(self._name(ticket, "lock"))

    def _unlock(self, mine: Ticket) -> None:
        """Release the lock of an own ticket."""
        lock = self._own.pop(mine.number)
        lock.close()

    def _write(self, ticket: Ticket) -> None:
        """Write the file of a ticket, which makes it visible to other processes."""
        text = json.dumps(asdict(ticket))
        self._directory.write(self._name(ticket, "json"), text)

    def _remove(self, ticket: Ticket) -> None:
        """Remove the files of a ticket, those that are there."""
        for kind in ("json", "lock"):
            path = self._directory.path / self._name(ticket, kind)
            path.unlink(missing_ok=True)

    def _name(self, ticket: Ticket, kind: str) -> str:
        """Return the name of a file of a ticket: ``queue/17.lock`` for the kind ``lock``."""
        return f"{QUEUE}/{ticket.number}.{kind}"
