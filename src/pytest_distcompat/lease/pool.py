"""Leases devices to one process group at a time, among all processes of one user on a machine.

A device is leased while the process that took it keeps the device's file locked and its name claimed, so the operating
system ends the lease of a process that dies, in whatever way. The name holds even if a cleaner removes the file. Beside each
lock lies who has it, for messages, and how much memory was in use before: a file that is still there when the lock can be had
tells of a holder that died.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote

import psutil

from pytest_distcompat import clock
from pytest_distcompat.decode import decode
from pytest_distcompat.failures import DistcompatError, UsageProblem
from pytest_distcompat.lease.directory import LeaseDirectory, TakenError
from pytest_distcompat.lease.inventory import Inventory
from pytest_distcompat.lease.memory import PATIENCE, TOLERANCE, DeviceMemory, Leak, Memory, await_free
from pytest_distcompat.lease.tickets import POLL, CircleError, Queue, Ticket, ahead
from pytest_distcompat.lease.timeline import Span, append, now
from pytest_distcompat.lease.watch import Blocker, GivenUpError, Holder, Watch

#: Differs between machines, and after a restart, with which the clock of tickets begins anew (``man 4 random``).
BOOT = Path("/proc/sys/kernel/random/boot_id")
#: How long to wait for a lease, in seconds: longer than any test should hold one.
TIMEOUT = 3600.0


class LeaseTimeout(DistcompatError, TimeoutError):
    """The devices were not to be had in time; the message says who holds them and who waits before."""


@dataclass
class Lease:
    """What was leased, and the environment that shows it to ranks and nothing else.

    ``ids`` are fewer than asked for where a request went on without the CPU slots that a suspended process holds.
    ``leak`` tells, from the beginning, what the last holder left if it died, and at the end what this lease left.
    """

    ids: tuple[str, ...]
    environment: Mapping[str, str]
    leak: tuple[Leak, ...] = field(default=())

    def __post_init__(self) -> None:
        self._inherited = len(self.leak)

    @property
    def own_leak(self) -> tuple[Leak, ...]:
        """What this lease itself left; nothing before its end."""
        return self.leak[self._inherited :]


_threads = threading.local()


def _held() -> set[Path]:
    """The locks of what is lent to this thread, of whichever pool."""
    found: set[Path] = vars(_threads).setdefault("held", set())
    return found


class Pool:
    """The devices of an inventory, leased from a directory that all who share them use.

    ``memory``, ``tolerance`` in bytes and ``patience`` in seconds say when a device is free again (``lease.memory``);
    ``timeline`` is the directory for the record of leases (``lease.timeline``), in which this process is ``worker``; ``say``
    tells the user at once what is waited for.
    Raises UsageProblem if the directory is not this user's own.
    """

    def __init__(
        self,
        directory: Path | None,
        inventory: Inventory,
        *,
        memory: Memory | None = None,
        tolerance: int = TOLERANCE,
        patience: float = PATIENCE,
        timeline: Path | None = None,
        worker: str = "",
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.inventory = inventory
        self._directory = LeaseDirectory(directory or default_directory())
        self._queue = Queue(self._directory)
        self._memory = memory or DeviceMemory()
        self._tolerance = tolerance
        self._patience = patience
        self._timeline = timeline
        self._worker = worker
        self._say = say
        self._run = str(timeline or "")
        #: What a request went on without, so that the next one need not wait for it again.
        self._given_up: set[Blocker] = set()

    @contextlib.contextmanager
    def lease(self, ranks: int, *, who: str, timeout: float = TIMEOUT) -> Iterator[Lease]:
        """Devices for so many ranks, all or none, for the block; ``who`` is told to others who wait.

        Raises UsageProblem for more GPUs than there are, and for devices that this thread has itself: it would wait for them as
        long as it has them. LeaseTimeout after ``timeout`` seconds of waiting, and at once where others hold what this one waits
        for and wait for what it holds.
        """
        count = self.inventory.needed(ranks)
        mine = tuple(name for name in self.inventory.ids if self._path(name, "lock") in _held())
        if timeout > 0 and count > len(self.inventory.ids) - len(mine):
            there = f"{len(mine)} of the {len(self.inventory.ids)} {self.inventory.words} are lent to what asks already"
            raise UsageProblem(f"{who}: {count} are needed, and {there}")
        asked = now()
        with contextlib.ExitStack() as held:
            ids = self._take(count, who, asked.monotonic + timeout, held, mine)
            left = self._left_by_the_dead(ids)
            got = now()
            before = self._memory.used(ids) if self.inventory.kind == "gpu" else {}
            for name in ids:
                self._sign(Holder(name, who, os.getpid(), got.wall, before.get(name), self._run))
            lease = Lease(ids, self.inventory.environment(ids), left)
            owner = os.getpid()
            own = {self._path(name, "lock") for name in ids}
            _held().update(own)
            try:
                yield lease
            finally:
                _held().difference_update(own)
                # A forked child that leaves the block gives nothing back: the lease is its parent's.
                if os.getpid() == owner:
                    self._see_free(lease, who, before)
                    if self._timeline is not None:
                        # No test depends on it.
                        with contextlib.suppress(OSError):
                            append(self._timeline, Span(ids, who, owner, asked, got, now(), lease.leak, self._worker))

    def _see_free(self, lease: Lease, who: str, before: Mapping[str, int]) -> None:
        """Wait for the memory of all its devices, and charge it with what does not come back."""
        above = await_free(self._memory, before, tolerance=self._tolerance, patience=self._patience)
        lease.leak += tuple(Leak(name, size, who) for name, size in above.items())
        for name in lease.ids:
            self._path(name, "json").unlink(missing_ok=True)

    def holders(self) -> list[Holder]:
        """Who has which device of the inventory at this moment."""
        return [holder for name in self.inventory.ids if (holder := self._holder(name)) is not None]

    def _holder(self, name: str) -> Holder | None:
        with contextlib.ExitStack() as probe:
            if self._lock(name, probe):
                return None
        signed = self._signed(name)
        if signed is not None and psutil.pid_exists(signed.pid):
            return signed
        # Who has not yet all that it asked for signs later; until then a dead one's name may stand there. Or a cleaner was here.
        return Holder(
            name,
            "a lease that is about to begin, or whose record was removed",
            self._directory.claimant(name),
            clock.wall(),
        )

    def _take(
        self, count: int, who: str, deadline: float, held: contextlib.ExitStack, mine: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Lock that many devices. What is locked is kept while waiting for more: nobody may take it before us who came later.

        Unless one of us has some already: what it has comes back when it was served, so nothing is kept from it, nor by it.
        """
        taken: set[str] = set()

        def in_the_way(ticket: Ticket | None) -> Iterator[Holder | Ticket]:
            names = (name for name in self.inventory.ids if name not in taken and name not in mine)
            yield from filter(None, map(self._holder, names))
            yield from ahead(ticket, self._queue.waiting()) if ticket is not None else ()

        watch = Watch(self.inventory, count, who, mine, in_the_way, self._given_up, run=self._run, say=self._say)
        try:
            with self._queue.turn(self.inventory.ids, count, who, deadline, look=watch, holds=mine) as ticket:
                while True:
                    for name in self.inventory.ids:
                        if len(taken) < count and name not in taken and self._lock(name, held):
                            taken.add(name)
                    if len(taken) == count or clock.now() >= deadline:
                        break
                    if mine or self._queue.overtaken(ticket):
                        held.close()
                        taken.clear()
                        self._queue.give_way(ticket, deadline, watch)
                    watch(ticket)
                    clock.sleep(POLL)
        except TakenError:
            # Somebody who came before still waits.
            pass
        except CircleError as circle:
            raise LeaseTimeout(_told(count, who, mine, circle)) from None
        except GivenUpError:
            count = len(taken)
        if len(taken) < count:
            raise LeaseTimeout(self._why(count, who, taken))
        return tuple(name for name in self.inventory.ids if name in taken)

    def _lock(self, name: str, held: contextlib.ExitStack) -> bool:
        """Lock a device until ``held`` is closed; whether it was free."""
        with contextlib.ExitStack() as both:
            try:
                both.callback(self._directory.lock(self._path(name, "lock").name).close)
                both.callback(self._directory.claim(name).close)
            except TakenError:
                return False
            held.push(both.pop_all())
        return True

    def _left_by_the_dead(self, ids: tuple[str, ...]) -> tuple[Leak, ...]:
        """Wait for the memory of holders that died before they could; what did not come back is theirs."""
        dead = {name: signed for name in ids if (signed := self._signed(name)) is not None}
        before = {name: holder.before for name, holder in dead.items() if holder.before is not None}
        above = await_free(self._memory, before, tolerance=self._tolerance, patience=self._patience)
        return tuple(Leak(name, size, dead[name].who) for name, size in above.items())

    def _why(self, count: int, who: str, taken: set[str]) -> str:
        lines = [f"{who}: no {count} of {len(self.inventory.ids)} {self.inventory.words} to be had in time"]
        for holder in (self._holder(name) for name in self.inventory.ids if name not in taken):
            if holder is not None:
                since = time.strftime("%H:%M:%S", time.localtime(holder.since))
                lines.append(f"  {holder.id} is held by {holder.who} (pid {holder.pid or 'unknown'}) since {since}")
        before = [ticket for ticket in self._queue.waiting() if set(ticket.ids) & set(self.inventory.ids)]
        lines.extend(f"  {ticket.who} (pid {ticket.pid}) waits for {ticket.count}" for ticket in before)
        return "\n".join(lines)

    def _sign(self, holder: Holder) -> None:
        self._directory.write(self._path(holder.id, "json").name, json.dumps(asdict(holder)))

    def _signed(self, name: str) -> Holder | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return decode(Holder, json.loads(self._path(name, "json").read_text(encoding="utf-8")))
        return None

    def _path(self, name: str, kind: str) -> Path:
        # An older MIG name has slashes.
        return self._directory.path / f"{quote(name, safe='')}.{kind}"


def _told(count: int, who: str, mine: tuple[str, ...], circle: CircleError) -> str:
    lines = [f"{who} holds {', '.join(mine)} and waits for {count} more, which would never be free:"]
    lines += [
        f"  {other.who} (pid {other.pid}) holds {', '.join(other.holds)} and waits for {other.count} more"
        for other in circle.others
    ]
    return "\n".join(lines)


def default_directory() -> Path:
    """The directory that all pytest runs of this user on this machine share.

    A temporary directory may be several machines', and neither slots nor the clock of tickets are. Containers of a machine
    have names of their own, and one boot.
    """
    try:
        machine = BOOT.read_text(encoding="ascii").strip()
    except OSError:
        machine = quote(socket.gethostname(), safe="")
    return Path(tempfile.gettempdir()) / f"distcompat-leases-{os.getuid()}-{machine}"
