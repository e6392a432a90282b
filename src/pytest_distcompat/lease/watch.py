"""Watch on a request that waits for devices: it reports what the request waits for.

``pool.Pool`` makes a ``Watch`` for each request and calls it in its loop, many times a second,
until the request has its devices. Once a second the watch looks who has them. After some seconds it
shows the user one line, ``waits for 2 of 4 CPU slots of pid 71 (test_a.py::test_b)``. The whole
text is for the message of a run that waits too long (``Pool.waits``).

A request for CPU slots does not wait for ever: slots only limit how many ranks share the cores. If
a suspended process has them, or another session has had them for a minute (in a debugger, say), the
watch raises ``GivenUpError``, and the request goes on without them. A request for GPUs waits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from pytest_distcompat import clock
from pytest_distcompat.excerpt import visible
from pytest_distcompat.lease.inventory import Inventory
from pytest_distcompat.lease.tickets import Ticket

#: After how many seconds of waiting the user is notified, and how often the holders are checked.
NOTIFY_AFTER_S = 2.0
_CHECK_INTERVAL_S = 1.0
#: The same if only workers of the same session hold the devices: workers often wait for each other.
NOTIFY_OF_WORKERS_AFTER_S = 60.0
#: A notice is one line of 100 columns, with the ``distcompat: `` before it.
NOTICE_COLUMNS = 100 - len("distcompat: ")
#: The name of a holder (a test's id) keeps at least this many characters in a notice, which then
#: may be longer than ``NOTICE_COLUMNS``.
_NAME_LEAST = 16
#: After how many seconds of waiting a request goes on without CPU slots that a suspended process
#: holds, or that another session has held for ``LONG_LEASE_S`` seconds (a debugger). Slots only
#: limit how many ranks share the cores.
GIVE_UP_AFTER_S = 5.0
LONG_LEASE_S = 60.0


@dataclass(frozen=True)
class Holder:
    """Process that has leased a device; it is also the record beside the device's lock.

    Attributes:
        id: The device (``GPU-8932f937-...`` or ``cpu-0.1``), or a place: the part of a GPU that one
            of several runs has (``GPU-8932f937-....place-1-of-4``).
        who: Names the lease in messages: the id of a test.
        pid: The process that holds it, 0 if unknown.
        since: When the lease began, in seconds since the epoch.
        before: The device's memory in use before the lease, in bytes, if known. If the holder dies,
            the next one waits until the memory above that is free.
        run: The pytest session that it belongs to, the same for all xdist workers; empty if
            unknown.
    """

    id: str
    who: str
    pid: int
    since: float
    before: int | None = None
    run: str = ""


#: What a request waits for: the holder of a device, or the ticket (a request in the queue) of an
#: earlier request, which is served first.
Blocker = Holder | Ticket


class GivenUpError(Exception):
    """The request goes on without the CPU slots that it waits for."""


@dataclass
class Watch:
    """Periodic check of what the request ``who`` for ``count`` devices waits for.

    Attributes:
        inventory: The devices of which it needs some.
        count: How many.
        who: Names the request: the id of a test.
        blockers: Returns the holders and tickets that the request waits for.
        given_up: Blockers that requests of this process have given up on, so that the next one does
            not wait for them again. All watches of a process share this set, and ``notified``.
        notified: The sessions, or pids as text, that a notice has named (see ``_session``), so that
            each wait for them is not a further line.
        run: The pytest session of the request, as in ``Holder``.
        notify: Shows the user a message; None to show none.
    """

    inventory: Inventory
    count: int
    who: str
    blockers: Callable[[], Iterable[Blocker]]
    given_up: set[Blocker]
    notified: set[str]
    run: str
    notify: Callable[[str], None] | None

    def __post_init__(self) -> None:
        #: Who had the devices or was to be served before, whenever it looked, as an ordered set of
        #: names.
        self.waited_for: dict[str, None] = {}
        #: What the request waits for, in words; empty before it first looked.
        self.text = ""
        self._began = clock.now()
        # A short wait is not worth a look. A process that has given up on holders before looks at
        # once, so as not to wait for the same ones again.
        delay = 0.0 if self.given_up else NOTIFY_AFTER_S
        self._next_check = self._began + delay

    def __call__(self) -> None:
        """Check the blockers if it is time to, and notify the user. Raises GivenUpError."""
        now = clock.now()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL_S
        waited = now - self._began
        blockers = list(self.blockers())
        self.waited_for.update(dict.fromkeys(blocker.who for blocker in blockers))
        self.text = self._text(blockers, waited)
        stuck = {blocker for blocker in blockers if self._stuck(blocker)}
        if self.inventory.kind == "cpu" and self._cannot_be_served(stuck):
            # The notice comes with the decision.
            self._give_up_in_time(stuck, waited)
        elif self.notify is not None:
            self._notify_in_time(blockers, stuck, waited)

    def _cannot_be_served(self, stuck: set[Blocker]) -> bool:
        """Tell whether the request cannot be served even when all others return their devices.

        ``stuck`` are the blockers that are expected to keep theirs.
        """
        stuck_devices = [blocker for blocker in stuck if isinstance(blocker, Holder)]
        if len(stuck_devices) < len(stuck):
            # Requests are served in order, so a stuck ticket before this one blocks it however many
            # devices are free.
            return True
        usable = len(self.inventory.ids) - len(stuck_devices)
        return usable < self.count

    def _give_up_in_time(self, stuck: set[Blocker], waited: float) -> None:
        """Raise GivenUpError if the request has waited long enough for these blockers.

        The user sees one line about it. For blockers that an earlier request gave up on there is no
        further wait and no further line.
        """
        known = stuck <= self.given_up
        if not known and waited < GIVE_UP_AFTER_S:
            return
        if not known and self.notify is not None:
            self.notify(self._notice("goes on without", list(stuck)))
        self.given_up.update(stuck)
        raise GivenUpError

    def _notify_in_time(self, blockers: list[Blocker], stuck: set[Blocker], waited: float) -> None:
        """Notify the user of blockers that are new.

        That is done later if all are workers of the same session: they often wait for each other,
        and not for long.
        """
        assert self.notify is not None
        # Those that may keep their devices for long: stuck ones, and other sessions.
        slow: list[Blocker] = []
        for blocker in blockers:
            if blocker in stuck or self._of_other_run(blocker):
                slow.append(blocker)
        notify_after = NOTIFY_AFTER_S if slow else NOTIFY_OF_WORKERS_AFTER_S
        if waited < notify_after:
            return
        news: list[Blocker] = []
        for blocker in slow or blockers:
            if _session(blocker) not in self.notified:
                news.append(blocker)
        if news:
            self.notified.update(map(_session, news))
            self.notify(self._notice("waits for", news))

    def _stuck(self, blocker: Blocker) -> bool:
        """Tell whether a blocker is suspended, or another session has held its device for long."""
        if _suspended(blocker.pid):
            return True
        if not isinstance(blocker, Holder):
            return False
        seconds = clock.wall() - blocker.since
        return seconds >= LONG_LEASE_S and not self._of_this_run(blocker)

    def _of_other_run(self, blocker: Blocker) -> bool:
        """Tell whether a blocker has a device, and belongs to another pytest session."""
        return isinstance(blocker, Holder) and not self._of_this_run(blocker)

    def _of_this_run(self, holder: Holder) -> bool:
        """Tell whether a holder belongs to the same pytest session as the request."""
        if holder.pid == os.getpid():
            return True
        return holder.run != "" and holder.run == self.run

    def _text(self, blockers: list[Blocker], waited: float) -> str:
        """Return what the request has waited for, with all its blockers.

        Devices of one lease are listed together: "test_b (pid 71) has had cpu-0.0, cpu-0.1 for
        3 s".
        """
        ids_by_lease: dict[tuple[str, int, float], list[str]] = {}
        tickets = []
        for blocker in blockers:
            if isinstance(blocker, Holder):
                lease = (blocker.who, blocker.pid, blocker.since)
                ids_by_lease.setdefault(lease, []).append(blocker.id)
            else:
                process = _process(blocker.pid)
                tickets.append(f"{blocker.who} ({process}) waits before it")
        holders = []
        for (who, pid, since), ids in ids_by_lease.items():
            devices = ", ".join(ids)
            process = _process(pid)
            seconds = max(0.0, clock.wall() - since)
            holders.append(f"{who} ({process}) has had {devices} for {seconds:.0f} s")
        waits_for = "; ".join(holders + tickets)
        return f"{self.who} has waited {waited:.0f} s for {self._devices}: {waits_for}"

    @property
    def _devices(self) -> str:
        total = len(self.inventory.ids)
        return f"{self.count} of {total} {self.inventory.words}"

    def _notice(self, verb: str, blockers: list[Blocker]) -> str:
        """Return one line about what the request waits for.

        It names one blocker, a stuck one if there is any, and counts the others. ``text`` and the
        error at the end of the wait have the rest.
        """
        first = blockers[0]
        for blocker in blockers:
            if self._stuck(blocker):
                first = blocker
                break
        other_pids = {blocker.pid for blocker in blockers} - {first.pid}
        others = ""
        if other_pids:
            plural = "s" if len(other_pids) > 1 else ""
            others = f" and {len(other_pids)} other{plural}"
        head = f"{verb} {self._devices} of {_process(first.pid)} ("
        tail = f"){others}"
        columns_left = NOTICE_COLUMNS - len(head) - len(tail)
        name = _shortened(visible(first.who), columns_left)
        return f"{head}{name}{tail}"


def _session(blocker: Blocker) -> str:
    """Return what identifies the session of a blocker, or its process if the session is unknown."""
    if isinstance(blocker, Holder) and blocker.run:
        return blocker.run
    return str(blocker.pid)


def _shortened(name: str, most: int) -> str:
    """Return the name with at most so many characters: of a test its end says the most.

    ``tests/test_a.py::test_b`` becomes ``...test_a.py::test_b`` in 20 characters.
    """
    most = max(most, _NAME_LEAST)
    if len(name) <= most:
        return name
    ending = name[3 - most :]
    return f"...{ending}"


def _process(pid: int) -> str:
    """Return the words for a process in messages: ``pid 71, suspended``."""
    suffix = ", suspended" if _suspended(pid) else ""
    return f"pid {pid or 'unknown'}{suffix}"


def _suspended(pid: int) -> bool:
    """Tell whether that process is stopped, by Ctrl-Z, SIGSTOP or a debugger."""
    if not pid:
        return False
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    return False
