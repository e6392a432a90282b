"""Timeline of leases: one line of JSON for each lease, from all processes in one file.

A lease is the time in which a process group has devices. ``pool.Pool`` appends a ``Span`` to the
file when a lease ends. At the end of the session the report reads the file: ``entries`` for a bar
of each device in the HTML page, ``gaps`` for why a device was free. The file's name is
``leases.jsonl``; it is in a directory of the session that all xdist workers share.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pytest_distcompat.decode import decode
from pytest_distcompat.places import device_of, places_in

FILE = "leases.jsonl"


@dataclass(frozen=True)
class Leak:
    """Device memory that was not in use before a lease, and still was after it.

    Attributes:
        id: The device.
        bytes: How much memory.
        who: The name of the lease.
    """

    id: str
    bytes: int
    who: str


@dataclass(frozen=True)
class Span:
    """One lease, from its request to its end. Times are in seconds of CLOCK_MONOTONIC.

    Attributes:
        ids: The names of the devices or, if several runs share devices, of their places
            (``places``).
        who: The name of the lease: the id of a test.
        pid: The process that had it.
        asked: When it was requested.
        got: When it began.
        released: When it ended.
        leak: The memory that it leaked, and what a dead holder before it left in use.
        worker: The name of the xdist worker that had it, ``gw0``; empty without xdist.
        waited_for: The names of the leases and requests that it waited for. A short wait does not
            look for them.
    """

    ids: tuple[str, ...]
    who: str
    pid: int
    asked: float
    got: float
    released: float
    leak: tuple[Leak, ...] = ()
    worker: str = ""
    waited_for: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long the lease had its devices, in seconds."""
        return self.released - self.got

    def on_node(self, node: str, ahead: float, worker: str) -> Span:
        """Return the lease of another machine as one of this machine, for one report of all.

        Args:
            node: The name of that machine. Devices get it before their names: ``n2 GPU-a``.
            ahead: By how many seconds the node's clock is ahead of this machine's.
            worker: The name of the xdist worker.
        """
        leaks: list[Leak] = []
        for leak in self.leak:
            leaks.append(replace(leak, id=f"{node} {leak.id}"))
        return replace(
            self,
            ids=tuple(f"{node} {device}" for device in self.ids),
            leak=tuple(leaks),
            asked=self.asked - ahead,
            got=self.got - ahead,
            released=self.released - ahead,
            worker=worker,
        )


def append(directory: Path, span: Span) -> None:
    """Add a lease to the timeline in the directory, which is created if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    # A single write to a file in append mode, so that lines of several processes do not mix.
    with (directory / FILE).open("ab", buffering=0) as file:
        line = json.dumps(asdict(span))
        file.write(f"{line}\n".encode())


def read_timeline(directory: Path) -> list[Span]:
    """Return all leases that have ended, in the order in which they began.

    Incomplete lines, of processes that died while they wrote, are ignored.
    """
    path = directory / FILE
    if not path.exists():
        return []
    spans = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            spans.append(decode(Span, json.loads(line)))
    return sorted(spans, key=lambda span: span.got)


def entries(directory: Path, since: float) -> list[dict[str, Any]]:
    """Return the timeline for a report, in the order in which leases began.

    There is an entry for each device, or place of a device, of each lease: ``{"device": "GPU-a",
    "part": 1.0, "who": "test_a.py::test_b", "worker": "gw0", "begin": 1.5, "end": 4.2, "leak":
    0}``. ``begin`` and ``end`` are in seconds after ``since``, which is of CLOCK_MONOTONIC;
    ``part`` is the fraction of the device; ``leak`` is in bytes.
    """
    rows = []
    for span in read_timeline(directory):
        for name in span.ids:
            row = {
                "device": name,
                "part": round(1 / places_in(name), 6),
                "who": span.who,
                "worker": span.worker,
                "begin": round(span.got - since, 3),
                "end": round(span.released - since, 3),
                "leak": _leaked(span, name),
            }
            rows.append(row)
    return rows


def _leaked(span: Span, name: str) -> int:
    """Return the bytes that a lease leaked on a device.

    A leak is of a device, not of a place. If the lease had several places of the device, the bytes
    count for the first of them, and 0 for the others.
    """
    device = device_of(name)
    places = [place for place in span.ids if device_of(place) == device]
    if name != places[0]:
        return 0
    total = 0
    for leak in span.leak:
        # Leaks of an earlier holder do not count for this lease.
        if leak.id == device and leak.who == span.who:
            total += leak.bytes
    return total


#: The shortest gap between leases, and the shortest wait of a request, that count, in seconds.
SHORTEST_GAP_S = 0.05


def gaps(spans: Sequence[Span], since: float, until: float) -> list[dict[str, Any]]:
    """Return the gaps in which devices were not leased, and why.

    Args:
        spans: All leases of the session.
        since: When the session began, in seconds of CLOCK_MONOTONIC.
        until: When it ended.

    Returns:
        For each gap a dict of ``device``, ``begin``, ``end`` and ``why``; times are in seconds
        after ``since``. ``why`` is a phrase such as ``nothing left to run``.
    """
    if not spans:
        return []
    rows: list[dict[str, Any]] = []
    reasons = _Reasons(spans)
    devices: set[str] = set()
    for span in spans:
        devices.update(span.ids)
    for device in sorted(devices):
        for free in _free_intervals(device, spans, since, until):
            for gap in reasons.pieces(free):
                if gap.end - gap.begin >= SHORTEST_GAP_S:
                    row = {
                        "device": device,
                        "begin": round(gap.begin - since, 3),
                        "end": round(gap.end - since, 3),
                        "why": gap.why,
                    }
                    rows.append(row)
    return rows


@dataclass(frozen=True)
class _Gap:
    """An interval in which a device was not leased, in seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float
    why: str = ""


def _free_intervals(device: str, spans: Sequence[Span], since: float, until: float) -> list[_Gap]:
    """Return the intervals before, between and after the leases of a device; some may be empty."""
    leases: list[tuple[float, float]] = []
    for span in spans:
        if device in span.ids:
            leases.append((span.got, span.released))
    intervals = []
    begin = since
    for got, released in sorted(leases):
        intervals.append(_Gap(begin, got))
        begin = released
    intervals.append(_Gap(begin, until))
    return intervals


class _Reasons:
    """Tells why devices were free at any time of a session, from when requests were made."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.first_request = min(span.asked for span in spans)
        self.last_release = max(span.released for span in spans)
        self.waits: list[Span] = []
        for span in spans:
            waited = span.got - span.asked
            if waited >= SHORTEST_GAP_S:
                self.waits.append(span)
        # The reason can change only at these times.
        times = {self.first_request, self.last_release}
        for span in self.waits:
            times |= {span.asked, span.got}
        self.times = sorted(times)

    def pieces(self, free: _Gap) -> list[_Gap]:
        """Return the parts of an interval that have one reason each."""
        cuts = [free.begin]
        for time in self.times:
            if free.begin < time < free.end:
                cuts.append(time)
        cuts.append(free.end)
        pieces: list[_Gap] = []
        for begin, end in itertools.pairwise(cuts):
            why = self.why((begin + end) / 2)
            if pieces and pieces[-1].why == why:
                pieces[-1] = replace(pieces[-1], end=end)
            else:
                pieces.append(_Gap(begin, end, why))
        return pieces

    def why(self, time: float) -> str:
        """Return why a device that is free at this time is not leased."""
        if time < self.first_request:
            return "collection, and start of the fork servers"
        if time > self.last_release:
            return "nothing left to run"
        waiting = [span for span in self.waits if span.asked <= time < span.got]
        if not waiting:
            return "no run to start: checks read what ran"
        holders: dict[str, None] = {}
        for span in waiting:
            holders.update(dict.fromkeys(span.waited_for))
        if holders:
            names = ", ".join(holders)
            return f"a run waits for {names}"
        return "a run waits for more devices"
