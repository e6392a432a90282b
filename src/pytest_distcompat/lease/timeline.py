"""Timeline of leases: one line of JSON for each lease, from all processes in one file."""

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
    """Memory that was not in use before the lease of ``who``, and still was after it: ``bytes`` on the device ``id``."""

    id: str
    bytes: int
    who: str


@dataclass(frozen=True)
class Span:
    """One lease, from its request to its end, in seconds of CLOCK_MONOTONIC, which orders the events of a machine.

    ``ids`` are the names of devices or, where runs share them, of their places (``places``).
    ``worker`` is the name of the xdist worker that held it, if any; ``waited_for`` names the holders and requests that it
    waited for, as far as it waited long enough to look.
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
        """Return how long it had its devices, in seconds."""
        return self.released - self.got

    def on_node(self, node: str, ahead: float, worker: str) -> Span:
        """Return it with the node in the names of its devices, and by the clock here, which the node's is ahead of."""
        return replace(
            self,
            ids=tuple(f"{node} {device}" for device in self.ids),
            leak=tuple(replace(leak, id=f"{node} {leak.id}") for leak in self.leak),
            asked=self.asked - ahead,
            got=self.got - ahead,
            released=self.released - ahead,
            worker=worker,
        )


def append(directory: Path, span: Span) -> None:
    """Add one line to the timeline in that directory, which is made if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    # A single write to a file in append mode, so that lines of several processes do not mix.
    with (directory / FILE).open("ab", buffering=0) as file:
        file.write(f"{json.dumps(asdict(span))}\n".encode())


def read_timeline(directory: Path) -> list[Span]:
    """Return all leases that have ended, in the order in which they began; incomplete lines are ignored."""
    path = directory / FILE
    if not path.exists():
        return []
    spans = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            spans.append(decode(Span, json.loads(line)))
    return sorted(spans, key=lambda span: span.got)


def entries(directory: Path, since: float) -> list[dict[str, Any]]:
    """Return the timeline for a report: a dict for each device or place of each lease, in the order in which the leases began.

    ``begin`` and ``end`` are in seconds after ``since`` (of CLOCK_MONOTONIC), ``part`` is the part of the device, ``leak`` is in
    bytes.
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
    """Return the bytes that a lease leaked on a device; of several places of it, the first has them all."""
    device = device_of(name)
    places = [place for place in span.ids if device_of(place) == device]
    if name != places[0]:
        return 0
    # Leaks of an earlier holder do not count for this lease.
    return sum(leak.bytes for leak in span.leak if leak.id == device and leak.who == span.who)


#: Gaps of a device, and waits of a request, that are shorter are left out, in seconds.
SHORTEST_GAP_S = 0.05


def gaps(spans: Sequence[Span], since: float, until: float) -> list[dict[str, Any]]:
    """Return why devices were not leased in a session from ``since`` to ``until``, seconds of CLOCK_MONOTONIC.

    A dict of ``device``, ``begin``, ``end`` and ``why`` for each gap; ``since`` counts as 0.
    """
    if not spans:
        return []
    rows: list[dict[str, Any]] = []
    reasons = _Reasons(spans)
    devices = {device for span in spans for device in span.ids}
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
    """Interval in which a device was not leased, in seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float
    why: str = ""


def _free_intervals(device: str, spans: Sequence[Span], since: float, until: float) -> list[_Gap]:
    """Return the intervals before, between and after the leases of a device; some may be empty."""
    leases = sorted((span.got, span.released) for span in spans if device in span.ids)
    intervals = []
    begin = since
    for got, released in leases:
        intervals.append(_Gap(begin, got))
        begin = released
    intervals.append(_Gap(begin, until))
    return intervals


class _Reasons:
    """Why devices were free, at each time of a session."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.first_request = min(span.asked for span in spans)
        self.last_release = max(span.released for span in spans)
        self.waits = [span for span in spans if span.got - span.asked >= SHORTEST_GAP_S]
        # The reason may change at these times only.
        times = {self.first_request, self.last_release}
        for span in self.waits:
            times |= {span.asked, span.got}
        self.times = sorted(times)

    def pieces(self, free: _Gap) -> list[_Gap]:
        """Return the parts of an interval that have one reason each."""
        cuts = [free.begin]
        cuts += [time for time in self.times if free.begin < time < free.end]
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
            return f"a run waits for {', '.join(holders)}"
        return "a run waits for more devices"
