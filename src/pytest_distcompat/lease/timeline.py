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
from pytest_distcompat.lease.places import device_of, places_in

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

    ``ids`` are the names of devices or, where runs share them, of their places (``lease.places``).
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
        asked, got, released = (time - ahead for time in (self.asked, self.got, self.released))
        leak = tuple(replace(one, id=f"{node} {one.id}") for one in self.leak)
        ids = tuple(f"{node} {one}" for one in self.ids)
        return replace(self, ids=ids, leak=leak, asked=asked, got=got, released=released, worker=worker)


def append(directory: Path, span: Span) -> None:
    """Add one line to the timeline in that directory, which is made if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    # A single write to a file in append mode, so that lines of several processes do not mix.
    with (directory / FILE).open("ab", buffering=0) as file:
        file.write(f"{json.dumps(asdict(span))}\n".encode())


def read_timeline(directory: Path) -> list[Span]:
    """Return all leases that have ended, in the order in which they began; incomplete lines are ignored."""
    path = directory / FILE
    spans = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            spans.append(decode(Span, json.loads(line)))
    return sorted(spans, key=lambda span: span.got)


def entries(directory: Path, since: float) -> list[dict[str, Any]]:
    """Return the timeline for a report: a dict for each device or place of each lease, in the order in which the leases began.

    ``begin`` and ``end`` are in seconds after ``since`` (of CLOCK_MONOTONIC), ``part`` is the part of the device, ``leak`` is in
    bytes.
    """
    return [
        {
            "device": name,
            "part": round(1 / places_in(name), 6),
            "who": span.who,
            "worker": span.worker,
            "begin": round(span.got - since, 3),
            "end": round(span.released - since, 3),
            "leak": _leaked(span, name),
        }
        for span in read_timeline(directory)
        for name in span.ids
    ]


def _leaked(span: Span, name: str) -> int:
    """Return the bytes that a lease leaked on a device; of several places of it, the first has them all."""
    device = device_of(name)
    if next(other for other in span.ids if device_of(other) == device) != name:
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
    first, last = min(span.asked for span in spans), max(span.released for span in spans)
    waits = [span for span in spans if span.got - span.asked >= SHORTEST_GAP_S]
    times = sorted({first, last, *(time for span in waits for time in (span.asked, span.got))})

    def why(time: float) -> str:
        if time < first:
            return "collection, and start of the fork servers"
        if time > last:
            return "nothing left to run"
        waiting = [span for span in waits if span.asked <= time < span.got]
        holders = dict.fromkeys(who for span in waiting for who in span.waited_for)
        if holders:
            return f"a run waits for {', '.join(holders)}"
        return "a run waits for more devices" if waiting else "no run to start: checks read what ran"

    found: list[dict[str, Any]] = []
    for device in sorted({name for span in spans for name in span.ids}):
        own = sorted((span.got, span.released) for span in spans if device in span.ids)
        ends, begins = [since, *(end for _, end in own)], [*(begin for begin, _ in own), until]
        for free, taken in zip(ends, begins, strict=True):
            cuts = [free, *(time for time in times if free < time < taken), taken]
            pieces = [(why((begin + end) / 2), begin, end) for begin, end in itertools.pairwise(cuts)]
            for reason, group in itertools.groupby(pieces, key=lambda piece: piece[0]):
                _, [begin, *_], [*_, end] = zip(*group, strict=True)
                if end - begin >= SHORTEST_GAP_S:
                    seconds = {"begin": round(begin - since, 3), "end": round(end - since, 3)}
                    found.append({"device": device, **seconds, "why": reason})
    return found
