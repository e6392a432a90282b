"""Watch on a waiting request: reports what it waits for, and gives up on CPU slots that will not be free soon."""

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
#: The name of a holder keeps at least this many characters in a notice.
_NAME_LEAST = 16
#: After how many seconds of waiting a request goes on without CPU slots that a suspended process holds, or that another session
#: has held for ``LONG_LEASE_S`` seconds (a debugger). Slots only limit how many ranks share the cores.
GIVE_UP_AFTER_S = 5.0
LONG_LEASE_S = 60.0


@dataclass(frozen=True)
class Holder:
    """Holder of a device.

    Attributes:
        id: The device.
        who: Names the lease in messages.
        pid: The process that holds it, 0 if unknown.
        since: When the lease began, in seconds since the epoch.
        before: The device's memory in use before the lease, in bytes, if known.
        run: The pytest session that it belongs to, the same for all xdist workers; empty if unknown.
    """

    id: str
    who: str
    pid: int
    since: float
    before: int | None = None
    run: str = ""


#: A holder of a device, or a ticket to be served before.
Blocker = Holder | Ticket


class GivenUpError(Exception):
    """The request goes on without the CPU slots that it waits for."""


@dataclass
class Watch:
    """Periodic check of what the request ``who`` for ``count`` devices waits for.

    Attributes:
        blockers: Returns the holders and tickets that the request waits for.
        given_up: Blockers that earlier requests of this process have given up on, so that the next one does not wait for
            them again.
        notified: The sessions and processes that the user was told of, so that each wait for them is not a further line.
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
        #: Who held the devices or was to be served before, whenever it looked.
        self.waited_for: dict[str, None] = {}
        #: What the request waits for, in words; empty before it first looked.
        self.text = ""
        self._began = clock.now()
        self._next_check = self._began + (0.0 if self.given_up else NOTIFY_AFTER_S)

    def __call__(self) -> None:
        """Check the blockers if it is time to, and notify the user. Raises GivenUpError."""
        now = clock.now()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL_S
        waited = now - self._began
        blockers = list(self.blockers())
        self.waited_for.update(dict.fromkeys(one.who for one in blockers))
        self.text = self._text(blockers, waited)
        stuck = {one for one in blockers if self._stuck(one)}
        held = sum(isinstance(one, Holder) for one in stuck)
        # Whether the request cannot be served although all other holders return their devices. A stuck ticket blocks it however
        # many devices are free.
        too_few = len(self.inventory.ids) - held < self.count or held < len(stuck)
        if self.inventory.kind == "cpu" and too_few:
            known = stuck <= self.given_up
            if known or waited >= GIVE_UP_AFTER_S:
                if not known and self.notify is not None:
                    self.notify(self._notice("goes on without", list(stuck)))
                self.given_up.update(stuck)
                raise GivenUpError
            # The notice comes with the decision.
            return
        of_others = [
            one for one in blockers if one in stuck or (isinstance(one, Holder) and not self._of_this_run(one))
        ]
        if self.notify is None or waited < (NOTIFY_AFTER_S if of_others else NOTIFY_OF_WORKERS_AFTER_S):
            return
        news = [one for one in of_others or blockers if _session(one) not in self.notified]
        if news:
            self.notified.update(map(_session, news))
            self.notify(self._notice("waits for", news))

    def _stuck(self, one: Blocker) -> bool:
        if _suspended(one.pid):
            return True
        return isinstance(one, Holder) and clock.wall() - one.since >= LONG_LEASE_S and not self._of_this_run(one)

    def _of_this_run(self, holder: Holder) -> bool:
        return holder.pid == os.getpid() or (bool(holder.run) and holder.run == self.run)

    def _text(self, found: list[Blocker], waited: float) -> str:
        held: dict[tuple[str, int, float], list[str]] = {}
        parts = []
        for one in found:
            if isinstance(one, Holder):
                held.setdefault((one.who, one.pid, one.since), []).append(one.id)
            else:
                parts.append(f"{one.who} ({_process(one.pid)}) waits before it")
        holders = [
            f"{who} ({_process(pid)}) has had {', '.join(ids)} for {max(0.0, clock.wall() - since):.0f} s"
            for (who, pid, since), ids in held.items()
        ]
        return f"{self.who} has waited {waited:.0f} s for {self._devices}: {'; '.join(holders + parts)}"

    @property
    def _devices(self) -> str:
        return f"{self.count} of {len(self.inventory.ids)} {self.inventory.words}"

    def _notice(self, verb: str, blockers: list[Blocker]) -> str:
        """Return one line about what the request waits for; ``text`` and the error at the end of the wait have the rest."""
        first = next((one for one in blockers if self._stuck(one)), blockers[0])
        others = len({one.pid for one in blockers} - {first.pid})
        more = f" and {others} other{'s' * (others > 1)}" if others else ""
        head, tail = f"{verb} {self._devices} of {_process(first.pid)} (", f"){more}"
        return f"{head}{_shortened(visible(first.who), NOTICE_COLUMNS - len(head) - len(tail))}{tail}"


def _session(blocker: Blocker) -> str:
    """Return what identifies the session of a blocker, or its process if the session is unknown."""
    return (isinstance(blocker, Holder) and blocker.run) or str(blocker.pid)


def _shortened(name: str, most: int) -> str:
    """Return the name with at most so many characters: of a test its end says the most."""
    most = max(most, _NAME_LEAST)
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _process(pid: int) -> str:
    return f"pid {pid or 'unknown'}{', suspended' if _suspended(pid) else ''}"


def _suspended(pid: int) -> bool:
    """Tell whether that process is stopped, by Ctrl-Z, SIGSTOP or a debugger."""
    with contextlib.suppress(psutil.Error):
        return bool(pid) and psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    return False
