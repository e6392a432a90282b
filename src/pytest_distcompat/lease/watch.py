"""What a request waits for: told to the user, and on the CPU given up where nobody will give it back soon."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from pytest_distcompat import clock
from pytest_distcompat.lease.inventory import Inventory
from pytest_distcompat.lease.tickets import Ticket

#: After how many seconds of waiting the user is told who has the devices, how often again, and how often to look.
TOLD_AFTER = 2.0
TOLD_AGAIN = 60.0
_LOOK = 1.0
#: After how many seconds of waiting a request goes on without CPU slots, which only keep too many ranks from sharing the cores:
#: where a suspended process has them, or another run has had them for ``LONG`` seconds (a debugger).
GIVEN_UP_AFTER = 5.0
LONG = 60.0


@dataclass(frozen=True)
class Holder:
    """Who has a device: ``since`` when, in seconds since the epoch, and its memory in use ``before``, in bytes, if known.

    ``run`` is the pytest run that it belongs to, the same for all xdist workers; empty if unknown.
    """

    id: str
    who: str
    pid: int
    since: float
    before: int | None = None
    run: str = ""


#: Who holds a device, or has a ticket to be served before.
Blocker = Holder | Ticket


class GivenUpError(Exception):
    """The request goes on without the CPU slots that it waits for."""


@dataclass
class Watch:
    """Looks now and then at who is ``in_the_way`` of a request for so many devices by ``who``, who has some of his own already.

    ``given_up`` is what earlier requests of this ``run`` went on without, so that the next one need not wait for it again.
    """

    inventory: Inventory
    count: int
    who: str
    mine: tuple[str, ...]
    in_the_way: Callable[[Ticket | None], Iterable[Blocker]]
    given_up: set[Blocker]
    run: str
    say: Callable[[str], None] | None

    def __post_init__(self) -> None:
        """Begin to wait."""
        self._asked = clock.now()
        self._look = self._asked + (0.0 if self.given_up else TOLD_AFTER)
        self._tell = self._asked + TOLD_AFTER

    def __call__(self, ticket: Ticket | None) -> None:
        """Look if it is time to. Raises GivenUpError."""
        now = clock.now()
        if now < self._look:
            return
        self._look = now + _LOOK
        waited = now - self._asked
        found = list(self.in_the_way(ticket))
        stuck = {one for one in found if self._stuck(one)}
        if self.inventory.kind == "cpu" and self._too_few_without(stuck):
            known = stuck <= self.given_up
            if known or waited >= GIVEN_UP_AFTER:
                if not known:
                    self._tell_user(f"{self._text(found, waited)}; it goes on without, for ranks can share cores")
                self.given_up.update(stuck)
                raise GivenUpError
        # That the workers of one run wait for each other is no news.
        news = stuck or any(isinstance(one, Holder) and not self._of_this_run(one) for one in found)
        if now >= self._tell and (news or waited >= TOLD_AGAIN):
            self._tell = now + TOLD_AGAIN
            self._tell_user(self._text(found, waited))

    def _too_few_without(self, stuck: set[Blocker]) -> bool:
        """Tell whether too little is left for the request when all others gave back what they have."""
        held = sum(isinstance(one, Holder) for one in stuck)
        # A ticket before this one blocks it whatever is free.
        return len(self.inventory.ids) - len(self.mine) - held < self.count or held < len(stuck)

    def _stuck(self, one: Blocker) -> bool:
        if _suspended(one.pid):
            return True
        return isinstance(one, Holder) and clock.wall() - one.since >= LONG and not self._of_this_run(one)

    def _of_this_run(self, holder: Holder) -> bool:
        return holder.pid == os.getpid() or (bool(holder.run) and holder.run == self.run)

    def _tell_user(self, text: str) -> None:
        if self.say is not None:
            self.say(text)

    def _text(self, found: list[Blocker], waited: float) -> str:
        held: dict[tuple[str, int, float], list[str]] = {}
        parts = []
        for one in found:
            if isinstance(one, Holder):
                held.setdefault((one.who, one.pid, one.since), []).append(one.id)
            else:
                parts.append(f"{one.who} ({_process(one.pid)}) waits before it")
        had = [
            f"{who} ({_process(pid)}) has had {', '.join(ids)} for {max(0.0, clock.wall() - since):.0f} s"
            for (who, pid, since), ids in held.items()
        ]
        there = f"{self.count} of {len(self.inventory.ids)} {self.inventory.words}"
        return f"{self.who} has waited {waited:.0f} s for {there}: {'; '.join(had + parts)}"


def _process(pid: int) -> str:
    return f"pid {pid or 'unknown'}{', suspended' if _suspended(pid) else ''}"


def _suspended(pid: int) -> bool:
    """Tell whether that process is stopped, by Ctrl-Z, SIGSTOP or a debugger."""
    with contextlib.suppress(psutil.Error):
        return bool(pid) and psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    return False
