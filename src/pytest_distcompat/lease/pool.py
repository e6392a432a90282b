"""Pool of devices and places, leased to one process group at a time.

Before a process group starts, ``leased.LeasedLauncher`` (in each pytest process, and in each xdist
worker) enters ``Pool.lease(2, who="test_a.py::test_b")`` for its 2 ranks. It waits there until two
devices are free, starts the ranks with ``Lease.environment``, ``{"CUDA_VISIBLE_DEVICES": "0,3",
...}``, and leaves the block when the ranks have ended.

All processes of one user on a machine share the devices; there is no server. A device is a GPU, a
MIG instance (a part of a GPU with a UUID of its own), or a CPU slot: the right to run a rank on the
CPU. It is leased while a process has two things: the lock on the device's file, and the claim on
its name, an abstract socket address (``directory``). The operating system ends both for a process
that dies, however it dies. The claim holds even if a cleaner removes the file.

Each device has two files in the directory of the pool, named after it: ``cpu-0.1.lock``, which is
locked, and ``cpu-0.1.json``, the record of the holder. The record is for messages, and for the
memory in use before the lease. A record without a lock belongs to a holder that died.

Where runs share a GPU, a run leases a place for each rank, ``GPU-a.place-2-of-4`` (``places``): it
shares the lock on the GPU's file, and has a lock and a claim of its own on the place. So it
excludes a lease of the whole GPU, and of a GPU divided otherwise.

Memory that stays in use after a lease is a *leak*: a process of the ranks has survived. The next
holder is told who left it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import psutil

from pytest_distcompat import clock, devices
from pytest_distcompat.decode import decode
from pytest_distcompat.failures import DistcompatError, UsageProblem
from pytest_distcompat.lease.directory import LeaseDirectory, TakenError
from pytest_distcompat.lease.inventory import Inventory
from pytest_distcompat.lease.tickets import Queue, ahead
from pytest_distcompat.lease.timeline import Leak, Span, append
from pytest_distcompat.lease.watch import Blocker, GivenUpError, Holder, Watch
from pytest_distcompat.places import may_be_held_beside, place_names

#: Differs between machines, and between boots, because the clock of tickets restarts at boot (``man
#: 4 random``).
BOOT = Path("/proc/sys/kernel/random/boot_id")
#: How long to wait for a lease, in seconds: longer than any test should hold one.
TIMEOUT = 3600.0
#: How many bytes more than before a lease may stay in use after it. The driver's own use varies by
#: a few MiB; the least that a process uses, a CUDA context, is some hundreds.
TOLERANCE = 64 << 20
#: How long memory may take to become free, in seconds. That of a killed process takes a moment.
FREE_TIMEOUT_S = 10.0
#: The interval in which a request checks its turn and free devices, in seconds.
_POLL = 0.02
#: The interval between measurements of memory, in seconds.
_POLL_MEMORY = 0.05

#: Returns the bytes in use on each device, by all processes; devices whose use is unknown are left
#: out.
Memory = Callable[[Sequence[str]], Mapping[str, int]]

#: Device -> the names that are locked for it: its own, ``{"GPU-a": ("GPU-a",)}``, or those of its
#: places, ``{"GPU-a": ("GPU-a.place-1-of-4", "GPU-a.place-2-of-4")}``.
NamesByDevice = dict[str, tuple[str, ...]]


class LeaseTimeout(DistcompatError, TimeoutError):
    """The devices did not become free in time.

    The message says who holds them and who waits for them.
    """


@dataclass
class Lease:
    """Devices that are leased.

    Attributes:
        ids: The devices; fewer than requested if ranks share devices, or if the request went on
            without CPU slots that a suspended process has.
        environment: Variables that make only these devices visible; empty for CPU slots.
        places: Into how many places each device is divided, 1 if runs share none: with 4 a rank may
            use a quarter of the memory.
        leak: Memory that a dead holder left before this lease and, after the end of the lease,
            memory that it left itself.
        own_leak: The second of these alone.
    """

    ids: tuple[str, ...]
    environment: Mapping[str, str]
    places: int = 1
    leak: tuple[Leak, ...] = ()
    own_leak: tuple[Leak, ...] = ()


@dataclass(frozen=True)
class _Grant:
    """What a request was granted, and what is to be noted about it when the lease ends.

    Attributes:
        names: The devices and places that it holds.
        who: Names the request.
        requested_at: When it was made, by ``clock.now``.
        granted_at: When it had all its devices.
        waited_for: Who held the devices, or was served before.
        before: The memory in use on each device, in bytes, when the lease began.
        measure: Measures that memory.
    """

    names: tuple[str, ...]
    who: str
    requested_at: float
    granted_at: float
    waited_for: tuple[str, ...]
    before: Mapping[str, int]
    measure: Memory


#: The devices that this thread has leased, in its attribute ``ranks_by_lock``.
_this_thread = threading.local()


def _ranks_by_lock() -> Mapping[Path, int]:
    """Return the devices that this thread has leased.

    Keys are the paths of the devices' locks, values how many ranks may use each device.
    They are of all pools of this process. A test that was lent GPUs and starts a script finds them
    here (``Pool.lease``).
    """
    ranks_by_lock: Mapping[Path, int] = getattr(_this_thread, "ranks_by_lock", {})
    return ranks_by_lock


@contextlib.contextmanager
def _held_by_this_thread(ranks_by_lock: Mapping[Path, int]) -> Iterator[None]:
    """Note inside the block that this thread holds these devices too; see ``_ranks_by_lock``."""
    _this_thread.ranks_by_lock = {**_ranks_by_lock(), **ranks_by_lock}
    try:
        yield
    finally:
        others = dict(_ranks_by_lock())
        for path in ranks_by_lock:
            others.pop(path, None)
        _this_thread.ranks_by_lock = others


@dataclass(eq=False)
class Pool:
    """Devices of an inventory, leased through a directory that all processes share.

    Args:
        directory: The directory of the locks; None for the default one.
        inventory: The devices.
        memory: Measures the memory of the devices. By default NVML (NVIDIA's library for reading
            GPUs) does: all that is in use, or, where runs share GPUs, what this process and its
            children use.
        free_timeout: How long memory may take to become free after a lease, in seconds.
        timeline: The directory for the record of leases (``lease.timeline``), None for no record.
        worker: The name of this process in that record: ``gw0``, an xdist worker.
        session: Any text that names the pytest session of this process, the same for all its xdist
            workers; by default the directory of the record.
        notify: Shows the user one line about what a request waits for.

    Raises:
        UsageProblem: If the directory is not this user's own.
    """

    directory: Path | None
    inventory: Inventory
    _: KW_ONLY
    memory: Memory | None = None
    free_timeout: float = FREE_TIMEOUT_S
    timeline: Path | None = None
    worker: str = ""
    session: str = ""
    notify: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        self._directory = LeaseDirectory(self.directory or default_directory())
        self._queue = Queue(self._directory)
        self._used_memory = self.memory or devices.used_memory
        self._own_memory = self.memory or devices.own_memory
        #: ``session``, or its default; records and messages name the pytest session by it.
        self._run = self.session or str(self.timeline or "")
        #: Reports what the waiting request waits for; None while none waits.
        self._watch: Watch | None = None
        #: Holders that a request has given up on, so that the next one need not wait for them
        #: again.
        self._given_up: set[Blocker] = set()
        #: The sessions, or processes, of which the user has seen a line.
        self._notified: set[str] = set()

    @contextlib.contextmanager
    def lease(
        self, ranks: int, *, who: str, timeout: float = TIMEOUT, whole: bool = False
    ) -> Iterator[Lease]:
        """Lease devices for so many ranks inside the block, all at once.

        A thread that holds devices already gets those: a test that was lent GPUs starts its scripts
        on them. If it could wait for more, two such tests could wait for each other for ever.

        Args:
            ranks: The number of ranks.
            who: Names the request in messages to others who wait: a test's id.
            timeout: How long to wait for the devices, in seconds.
            whole: Whether to lease whole GPUs where other runs could share them.

        Raises:
            UsageProblem: If there are too few devices, or this thread holds some of them, but too
                few.
            LeaseTimeout: After ``timeout``.
        """
        # The number of devices.
        count = self.inventory.needed(ranks)
        # Whether other runs may be on the same devices.
        shares = self.inventory.places > 1 and not whole
        # The number of places on each device; 0 for whole devices.
        places = 0
        if shares:
            # The ranks on each device, rounded up: 3 ranks on 2 GPUs take 2 places on each.
            places = -(-ranks // count)
        mine = self._of_this_thread()
        if mine:
            yield self._lend_again(mine, count, places, who)
            return
        requested_at = clock.now()
        with contextlib.ExitStack() as locks:
            deadline = requested_at + timeout
            names_by_device, waited_for = self._take(count, places, who, deadline, locks)
            ids = tuple(names_by_device)
            names = tuple(itertools.chain(*names_by_device.values()))
            # Before this lease writes its own records, since those of dead holders are read.
            leaks_of_dead = self._await_dead_holders(names)
            granted_at = clock.now()
            since = clock.wall()
            measure = self._used_memory
            if shares:
                # The memory in use is also that of neighbours: only this process's own can be told
                # apart.
                measure = self._own_memory
            before: Mapping[str, int] = {}
            # CPU slots have no memory of their own.
            if self.inventory.kind == "gpu":
                before = measure(ids)
            recorded = before
            if shares:
                # The next holder compares the record with all memory in use, of which this is a
                # part.
                recorded = {}
            self._write_records(names, who, since, recorded)
            grant = _Grant(names, who, requested_at, granted_at, waited_for, before, measure)
            environment = self.inventory.environment(ids)
            lease = Lease(ids, environment, self.inventory.places, leaks_of_dead)
            owner = os.getpid()
            ranks_each = places or self.inventory.ranks_each
            ranks_by_lock = {self._path(device, "lock"): ranks_each for device in ids}
            try:
                with _held_by_this_thread(ranks_by_lock):
                    yield lease
            finally:
                # A forked child that leaves the block must not end the lease of its parent.
                if os.getpid() == owner:
                    self._end(lease, grant)

    def _of_this_thread(self) -> tuple[str, ...]:
        """Return the devices of the inventory that this thread has leased already."""
        mine: list[str] = []
        for device in self.inventory.ids:
            if self._path(device, "lock") in _ranks_by_lock():
                mine.append(device)
        return tuple(mine)

    def _await_dead_holders(self, names: Sequence[str]) -> tuple[Leak, ...]:
        """Wait until memory is free that dead holders of these devices used.

        They are the last holders, if they died before the end of their lease. Return what stays in
        use after ``free_timeout`` as their leaks.
        """
        before = {}
        who = {}
        for name in names:
            # A record without a lock is of a dead holder.
            dead_holder = self._read_record(name)
            if dead_holder is not None and dead_holder.before is not None:
                before[name] = dead_holder.before
                who[name] = dead_holder.who
        return self._await_free(before, who, self._used_memory)

    def _write_records(
        self, names: Sequence[str], who: str, since: float, before: Mapping[str, int]
    ) -> None:
        """Write who has leased these devices, for others who wait, and for the next holder.

        ``since`` is in seconds since the epoch; ``before`` has how many bytes of each device were
        in use before the lease, and lacks the devices of which that is not known.
        """
        for name in names:
            holder = Holder(name, who, os.getpid(), since, before.get(name), self._run)
            file_name = self._path(name, "json").name
            self._directory.write(file_name, json.dumps(asdict(holder)))

    def _end(self, lease: Lease, grant: _Grant) -> None:
        """Wait until the lease's memory is free, note what stays in use, and remove its records."""
        who = dict.fromkeys(lease.ids, grant.who)
        lease.own_leak = self._await_free(grant.before, who, grant.measure)
        lease.leak += lease.own_leak
        for name in grant.names:
            self._path(name, "json").unlink(missing_ok=True)
        if self.timeline is None:
            return
        # The record is for reports only.
        with contextlib.suppress(OSError):
            span = Span(
                grant.names,
                grant.who,
                os.getpid(),
                grant.requested_at,
                grant.granted_at,
                clock.now(),
                lease.leak,
                self.worker,
                grant.waited_for,
            )
            append(self.timeline, span)

    def _lend_again(self, mine: tuple[str, ...], count: int, places: int, who: str) -> Lease:
        """Return a lease of devices that this thread has already: nothing is locked or awaited.

        Args:
            mine: These devices.
            count: How many the new request needs.
            places: How many ranks are to share each; 0 if none.
            who: Names the new request.

        Raises:
            UsageProblem: If this thread has too few.
        """
        if self.inventory.kind == "gpu" and count > len(mine):
            raise UsageProblem(
                f"{who}: {count} GPUs are needed, and the test that starts it was lent {len(mine)}"
            )
        ids = mine[:count]
        ranks_by_lock = _ranks_by_lock()
        # The number of ranks that each of the devices is leased for, or the least of these.
        ranks = min(ranks_by_lock[self._path(device, "lock")] for device in ids)
        if places > ranks:
            raise UsageProblem(
                f"{who}: {places} ranks need a GPU, and what starts them has it for {ranks}"
            )
        return Lease(ids, self.inventory.environment(ids), self.inventory.places)

    @property
    def waits(self) -> str:
        """Devices that a request of this process waits for, with holder and time.

        It is empty if none waits for long.
        """
        return self._watch.text if self._watch is not None else ""

    def holders(self) -> list[Holder]:
        """Return the current holders of the devices of the inventory."""
        holders = []
        for device in self.inventory.ids:
            holders += self._holders(device)
        return holders

    def _holders(self, device: str) -> list[Holder]:
        """Return the holder of a device, or those of its places; none if it is free."""
        # A device is free if it can be locked; the lock is given back at once.
        with contextlib.ExitStack() as locks:
            if self._lock_whole(device, locks):
                return []
        holders = []
        for name in self._names(device):
            if name != device and self._is_held(name):
                holders.append(self._holder(name))
        return holders or [self._holder(device)]

    def _holder(self, name: str) -> Holder:
        """Return the holder of a device or place that is held."""
        record = self._read_record(name)
        if record is not None and psutil.pid_exists(record.pid):
            return record
        # A lease writes its record when it has all its devices; until then that of a dead holder
        # may be there, or none.
        unknown = "a lease that is about to begin, or whose record was removed"
        return Holder(name, unknown, self._directory.claimant(name), clock.wall())

    def _take(
        self, count: int, places: int, who: str, deadline: float, locks: contextlib.ExitStack
    ) -> tuple[NamesByDevice, tuple[str, ...]]:
        """Wait until the request has its devices or places, and lock them.

        Devices stay locked while the request waits for more, so that a later request cannot take
        them. They are given back if another request is to be served first.

        Args:
            count: The number of devices.
            places: The number of places on each of them; 0 for whole devices.
            who: Names the request.
            deadline: When to give up, by ``clock.now``.
            locks: Releases the locks when it is closed.

        Returns:
            For each device the names that are locked, its own or those of its places; and whom the
            request waited for.

        Raises:
            LeaseTimeout: At the deadline.
        """
        taken: NamesByDevice = {}

        # ``watch`` calls it while the request has its ticket, below.
        def blockers() -> Iterator[Blocker]:
            """Yield the holders and the tickets that the request waits for."""
            for device in self.inventory.ids:
                if device not in taken:
                    yield from self._holders(device)
            # The requests that came before, and may take one of these devices.
            yield from ahead(ticket, self._queue.waiting())

        watch = Watch(
            self.inventory,
            count,
            who,
            blockers,
            self._given_up,
            self._notified,
            run=self._run,
            notify=self.notify,
        )
        self._watch = watch
        try:
            # A ticket is the place of the request in the queue of all processes.
            with self._queue.ticket(self.inventory.ids, count, who) as ticket:
                while True:
                    if self._queue.overtaken(ticket):
                        # Another request is served first: it may need what this one has.
                        locks.close()
                        taken.clear()
                    else:
                        self._lock_free(count, places, taken, locks)
                    if len(taken) == count or clock.now() >= deadline:
                        break
                    # Tells the user whom the request waits for. Raises GivenUpError where that
                    # never ends.
                    watch()
                    clock.sleep(_POLL)
        except GivenUpError:
            # The request goes on with the CPU slots that it has, perhaps none.
            count = len(taken)
        finally:
            self._watch = None
        if len(taken) < count:
            raise LeaseTimeout(self._timeout_message(count, who, taken))
        in_order = sorted(taken, key=self.inventory.ids.index)
        return {device: taken[device] for device in in_order}, tuple(watch.waited_for)

    def _lock_free(
        self,
        count: int,
        places: int,
        taken: NamesByDevice,
        locks: contextlib.ExitStack,
    ) -> None:
        """Lock what is free now, until ``count`` devices are taken.

        Of places those on the devices with the fewest runs are locked first. The arguments are
        those of ``_take``; ``taken`` has what is locked already, and grows.
        """
        order: Sequence[str] = self.inventory.ids
        if places:
            order = sorted(order, key=lambda device: len(self._directory.claimed(device)))
        for device in order:
            if len(taken) >= count or device in taken:
                continue
            if places:
                names = self._lock_places(device, places, locks)
            else:
                names = self._lock_whole(device, locks)
            if names:
                taken[device] = names

    def _lock_whole(self, device: str, locks: contextlib.ExitStack) -> tuple[str, ...]:
        """Lock a device until ``locks`` is closed.

        Return its name alone in a tuple, or an empty one if the device was not free.
        """
        with contextlib.ExitStack() as own:
            if not self._lock(device, own):
                return ()
            # Holders of its places have locked the device's file, but a cleaner may have removed
            # it. CPU slots have no places.
            if self.inventory.kind == "gpu" and self._has_claimed_places(device):
                return ()
            # Success: the lock outlives this block. On any other way out ``own`` releases it.
            locks.push(own.pop_all())
        return (device,)

    def _has_claimed_places(self, device: str) -> bool:
        """Tell whether a process has claimed a place of a device.

        This process has just claimed the whole device, so its name is among the claims, unless the
        kernel does not list them.
        """
        claims = self._directory.claimed(device)
        return claims not in ([], [device])

    def _lock_places(self, device: str, count: int, locks: contextlib.ExitStack) -> tuple[str, ...]:
        """Lock so many places of a device until ``locks`` is closed.

        Return their names, or nothing if fewer were free.
        """
        names: list[str] = []
        file_name = self._path(device, "lock").name
        with contextlib.ExitStack() as own:
            try:
                shared = self._directory.lock(file_name, shared=True)
            except TakenError:
                return ()
            own.callback(shared.close)
            for name in place_names(device, self.inventory.places):
                if len(names) < count and self._lock(name, own):
                    names.append(name)
            if len(names) < count:
                return ()
            # The request has its own locks by now. So of two requests that exclude each other, and
            # look at the same time, at least one sees the locks of the other.
            if self._is_excluded(device, names):
                return ()
            locks.push(own.pop_all())
        return tuple(names)

    def _is_excluded(self, device: str, places: Sequence[str]) -> bool:
        """Tell whether another process has what excludes these places of the device.

        That is the whole device, or a place of a division into another number of places.
        """
        for name in self._names(device):
            # Places of a division into equally many places exclude nobody.
            if name in places or may_be_held_beside(name, places[0]):
                continue
            if self._is_held(name):
                return True
        return False

    def _lock(self, name: str, locks: contextlib.ExitStack) -> bool:
        """Lock a device or place until ``locks`` is closed; return whether it was free."""
        file_name = self._path(name, "lock").name
        with contextlib.ExitStack() as both:
            try:
                both.callback(self._directory.lock(file_name).close)
                both.callback(self._directory.claim(name).close)
            except TakenError:
                return False
            locks.push(both.pop_all())
        return True

    def _names(self, device: str) -> list[str]:
        """Return the names of a device and of its places that may be leased.

        They are all that are claimed or have a file, the shortest first: the device itself.
        """
        if self.inventory.kind == "cpu":
            # A slot has no places.
            return [device]
        files = self._directory.path.glob(self._path(device, "place-*.lock").name)
        names = set(self._directory.claimed(device))
        # A cleaner of temporary directories may remove the directory while it is read.
        with contextlib.suppress(FileNotFoundError):
            for path in files:
                names.add(unquote(path.stem))
        return sorted(names, key=lambda name: (len(name), name))

    def _is_held(self, name: str) -> bool:
        """Tell whether a process has leased a device or place: then it cannot be locked."""
        with contextlib.ExitStack() as lock:
            return not self._lock(name, lock)

    def _await_free(
        self, before: Mapping[str, int], who: Mapping[str, str], measure: Memory
    ) -> tuple[Leak, ...]:
        """Wait until these devices use no more memory than before a lease.

        Args:
            before: Device -> bytes in use before it.
            who: Device -> who had it.
            measure: Measures the bytes in use now.

        Returns:
            What stays in use after ``free_timeout``, but for ``TOLERANCE``; empty if nothing does.
        """
        deadline = clock.now() + self.free_timeout
        while True:
            used = measure(list(before)) if before else {}
            leaks = []
            for name, used_bytes in used.items():
                leak = Leak(name, used_bytes - before[name], who[name])
                if leak.bytes > TOLERANCE:
                    leaks.append(leak)
            if not leaks or clock.now() >= deadline:
                return tuple(leaks)
            clock.sleep(_POLL_MEMORY)

    def _timeout_message(self, count: int, who: str, taken: Container[str]) -> str:
        """Return who holds the devices that were not to be had, and who waits for them."""
        devices_in_words = f"{len(self.inventory.ids)} {self.inventory.words}"
        lines = [f"{who}: no {count} of {devices_in_words} to be had in time"]
        for device in self.inventory.ids:
            if device in taken:
                continue
            for holder in self._holders(device):
                since = time.strftime("%H:%M:%S", time.localtime(holder.since))
                pid = holder.pid or "unknown"
                lines.append(f"  {holder.id} is held by {holder.who} (pid {pid}) since {since}")
        for ticket in self._queue.waiting():
            if set(ticket.ids) & set(self.inventory.ids):
                lines.append(f"  {ticket.who} (pid {ticket.pid}) waits for {ticket.count}")
        return "\n".join(lines)

    def _read_record(self, name: str) -> Holder | None:
        """Return the record of the holder of a device or place; None without one.

        The holder may be dead.
        """
        path = self._path(name, "json")
        with contextlib.suppress(FileNotFoundError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            return decode(Holder, record)
        return None

    def _path(self, name: str, kind: str) -> Path:
        """Return the file of a device or place; ``kind`` is ``lock`` or ``json``."""
        # Older names of MIG devices contain slashes.
        quoted = quote(name, safe="")
        return self._directory.path / f"{quoted}.{kind}"


def boot_id() -> str:
    """Return the id of this boot; empty where unknown.

    It tells whether two processes share CLOCK_MONOTONIC.
    """
    with contextlib.suppress(OSError):
        return BOOT.read_text(encoding="ascii").strip()
    return ""


def default_directory() -> Path:
    """Return the directory that all pytest sessions of this user on this machine share.

    Its name contains the id of the boot, because machines may share a temporary directory, but not
    slots and clocks. The host name would not do: containers of one machine have different ones.
    """
    machine = boot_id() or quote(socket.gethostname(), safe="")
    name = f"distcompat-leases-{os.getuid()}-{machine}"
    return Path(tempfile.gettempdir()) / name
