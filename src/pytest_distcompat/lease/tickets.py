"""Who is served before whom: a queue of tickets, each a file that its owner keeps locked while it waits.

First come, first served. Nobody overtakes an earlier ticket that may take one of the same devices, so a large request is
served after those that came before it, however many small ones follow. Tickets of inventories with no device in common do
not see each other: that delays nobody. Who holds devices already and asks for more (a test that was lent some and starts a
script) overtakes who holds none: what it holds comes back when it was served, and not before. A small request that would
fit beside a waiting large one does wait; packing (``packing.py``) keeps that rare by asking for the large ones first.

The operating system unlocks the file of a process that dies, and so takes it out of the queue.
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

#: How often a waiter looks, in seconds.
POLL = 0.02
#: The same for the lock around taking a ticket, which is held for well under a millisecond.
_POLL_JOINING = 0.002


@dataclass(frozen=True)
class Ticket:
    """A request: the devices that it may take (``ids``), how many of them, for whom; and which of them that one ``holds``."""

    number: int
    ids: tuple[str, ...]
    count: int
    who: str
    pid: int = 0
    holds: tuple[str, ...] = ()


#: What a waiter calls again and again, with its ticket if it has one.
Look = Callable[[Ticket | None], None]


class CircleError(Exception):
    """The asker, and ``others``, hold devices and wait for more than all the rest would ever give back."""

    def __init__(self, others: list[Ticket]) -> None:
        super().__init__(", ".join(other.who for other in others))
        self.others = others


def ahead(mine: Ticket, others: Iterable[Ticket]) -> list[Ticket]:
    """The tickets to be served before ``mine``, of those that may take one of its devices; the nearest first.

    Nobody waits for others while he holds what they may wait for.
    """
    if mine.holds:
        return []
    rivals = [other for other in others if set(other.ids) & set(mine.ids)]
    before = [other for other in rivals if other.holds or other.number < mine.number]
    return sorted(before, key=lambda ticket: (not ticket.holds, ticket.number), reverse=True)


def circle(mine: Ticket, others: Iterable[Ticket]) -> list[Ticket]:
    """The other tickets of a circle that ``mine``, of one who holds devices, closes; none if it closes none.

    Whoever holds devices and does not wait gives them back some day. Those that hold some and wait do so only if one of them
    can be served from the rest.
    """
    rivals = [other for other in others if other.number != mine.number and set(other.ids) & set(mine.ids)]
    waiting = [other for other in rivals if other.holds]
    kept = {name for ticket in (mine, *waiting) for name in ticket.holds}
    served = any(ticket.count <= len(set(ticket.ids) - kept) for ticket in (mine, *waiting))
    return [] if served else waiting


class Queue:
    """The tickets of all processes, as files of one directory. Who waits lays its ticket there again if it is removed."""

    def __init__(self, directory: LeaseDirectory) -> None:
        self._directory = directory
        #: The locks of this process's own tickets, by their numbers.
        self._own: dict[int, FileLock] = {}

    @contextlib.contextmanager
    def turn(
        self, ids: tuple[str, ...], count: int, who: str, deadline: float, *, look: Look, holds: tuple[str, ...] = ()
    ) -> Iterator[Ticket]:
        """Wait for one's turn and keep it in the block, unless ``overtaken``; call ``look`` again and again meanwhile.

        Raises TakenError at ``deadline`` (monotonic seconds), and CircleError at once.
        """
        with self._joined(ids, count, who, deadline, look=look, holds=holds) as mine:
            # Who closes a circle sees all of it: nobody in it leaves the queue before it is served.
            if holds and (others := circle(mine, self.waiting())):
                raise CircleError(others)
            self.give_way(mine, deadline, look)
            yield mine

    def overtaken(self, mine: Ticket) -> bool:
        """Whether there is a ticket to be served before that one."""
        self._stay(mine)
        return bool(ahead(mine, self._tickets()))

    def give_way(self, mine: Ticket, deadline: float, look: Look) -> None:
        """Wait until there is none. Raises TakenError."""

        def stay_and_look() -> None:
            self._stay(mine)
            look(mine)

        while before := ahead(mine, self._tickets()):
            self._await_end(before[0], deadline, stay_and_look)
            self._stay(mine)

    def waiting(self) -> list[Ticket]:
        """The tickets whose owners live, in order."""
        return [ticket for ticket in self._tickets() if not self._ended(ticket)]

    @contextlib.contextmanager
    def _joined(
        self, ids: tuple[str, ...], count: int, who: str, deadline: float, *, look: Look, holds: tuple[str, ...]
    ) -> Iterator[Ticket]:
        joining = self._acquired(f"{QUEUE}/joining.lock", deadline, _POLL_JOINING, lambda: look(None))
        with contextlib.closing(joining):
            # All processes of a machine share this clock, so numbers grow; and none comes twice, not even when its
            # owner is long gone and somebody still looks for it.
            mine = Ticket(clock.now_ns(), ids, count, who, os.getpid(), holds)
            self._own[mine.number] = self._directory.lock(self._name(mine, "lock"))
            try:
                # Only now: a ticket that can be seen and is not locked is a dead man's.
                self._directory.write(self._name(mine, "json"), json.dumps(asdict(mine)))
            except BaseException:
                self._own.pop(mine.number).close()
                raise
        try:
            yield mine
        finally:
            # Before the lock is let go.
            self._forget(mine)
            self._own.pop(mine.number).close()

    def _stay(self, mine: Ticket) -> None:
        """Lay one's ticket there again where it was removed: who comes later must not take the same turn."""
        lock = self._own[mine.number]
        if not lock.in_place():
            # Who finds a ticket unlocked is about to remove it as a dead man's: the next time, then.
            with contextlib.suppress(TakenError):
                self._own[mine.number] = self._directory.lock(self._name(mine, "lock"))
                lock.close()
        if self._own[mine.number].in_place() and not (self._directory.path / self._name(mine, "json")).exists():
            self._directory.write(self._name(mine, "json"), json.dumps(asdict(mine)))

    def _await_end(self, other: Ticket, deadline: float, look: Callable[[], None] = lambda: None) -> None:
        """Wait until its owner has been served, has given up or is dead; then its lock can be had."""
        with contextlib.closing(self._acquired(self._name(other, "lock"), deadline, POLL, look)):
            self._forget(other)

    def _ended(self, other: Ticket) -> bool:
        try:
            self._await_end(other, 0.0)
        except TakenError:
            return False
        return True

    def _tickets(self) -> list[Ticket]:
        """All tickets, those of the dead included, in order."""
        found = []
        for text in self._directory.tickets():
            # It may be half written, or by another version of this package, which tells more or less.
            with contextlib.suppress(ValueError):
                found.append(decode(Ticket, json.loads(text)))
        return sorted(found, key=lambda ticket: ticket.number)

    def _forget(self, ticket: Ticket) -> None:
        for kind in ("json", "lock"):
            (self._directory.path / self._name(ticket, kind)).unlink(missing_ok=True)

    def _name(self, ticket: Ticket, kind: str) -> str:
        return f"{QUEUE}/{ticket.number}.{kind}"

    def _acquired(self, name: str, deadline: float, interval: float, look: Callable[[], None]) -> FileLock:
        """Wait for that lock. Raises TakenError at the deadline."""
        while True:
            try:
                return self._directory.lock(name)
            except TakenError:
                if clock.now() >= deadline:
                    raise
            look()
            clock.sleep(interval)
