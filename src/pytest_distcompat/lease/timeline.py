"""Who had what from when to when: a line of JSON for each lease, from all processes into one file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pytest_distcompat import clock
from pytest_distcompat.lease.memory import Leak

FILE = "leases.jsonl"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class Instant(NamedTuple):
    """A point in time in seconds: CLOCK_MONOTONIC, which orders the events of a machine, and since the epoch."""

    monotonic: float
    wall: float


@dataclass(frozen=True)
class Span:
    """One lease, from its request to its end; ``worker`` is what the process that held it is called, if anything."""

    ids: tuple[str, ...]
    who: str
    pid: int
    asked: Instant
    got: Instant
    released: Instant
    leak: tuple[Leak, ...] = ()
    worker: str = ""

    @property
    def seconds(self) -> float:
        """How long it had its devices."""
        return self.released.monotonic - self.got.monotonic


def now() -> Instant:
    """This instant."""
    return Instant(clock.now(), clock.wall())


def append(directory: Path, span: Span) -> None:
    """Add one line to the timeline in that directory, made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(span)) + "\n"
    # One write of an appending file: lines of several processes do not mix.
    file = os.open(directory / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_timeline(directory: Path) -> list[Span]:
    """All leases that ended so far, in the order in which they began; a line that was left unfinished is dropped."""
    path = directory / FILE
    spans = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            spans.append(_span(json.loads(line)))
    return sorted(spans, key=lambda span: span.got)


def _span(data: dict[str, Any]) -> Span:
    asked, got, released = (Instant(*data[name]) for name in ("asked", "got", "released"))
    leak = tuple(Leak(**one) for one in data["leak"])
    return Span(tuple(data["ids"]), data["who"], data["pid"], asked, got, released, leak, data["worker"])


def entries(directory: Path, since: float) -> list[dict[str, Any]]:
    """The timeline as a report has it: a plain dict for each device of each lease, in the order in which they began.

    ``device``, ``who``, ``worker``, ``begin`` and ``end`` in seconds after ``since`` (CLOCK_MONOTONIC), and ``leak``, the
    bytes that stayed in use there after its end.
    """
    return [
        {
            "device": name,
            "who": span.who,
            "worker": span.worker,
            "begin": round(span.got.monotonic - since, 3),
            "end": round(span.released.monotonic - since, 3),
            # What an earlier holder left is charged to that one.
            "leak": sum(leak.bytes for leak in span.leak if leak.id == name and leak.who == span.who),
        }
        for span in read_timeline(directory)
        for name in span.ids
    ]


def busy(spans: Iterable[Span], ids: Sequence[str]) -> float:
    """Which part of the devices' time, from the first lease's begin to the last one's end, was leased: 0 to 1."""
    known = list(spans)
    if not known:
        return 0.0
    length = max(span.released.monotonic for span in known) - min(span.got.monotonic for span in known)
    leased = sum(len(span.ids) * span.seconds for span in known)
    return leased / (len(ids) * length) if length else 0.0


def chart(spans: Sequence[Span], ids: Sequence[str], width: int = 80) -> list[str]:
    """The timeline as text: a line for each device, a letter for each lease, a dot where nobody had it."""
    if not spans:
        return []
    begin = min(span.got.monotonic for span in spans)
    column = (max(span.released.monotonic for span in spans) - begin) / width or 1.0
    rows = {name: ["."] * width for name in ids}
    for place, span in enumerate(spans):
        first = min(width - 1, round((span.got.monotonic - begin) / column))
        last = max(first + 1, round((span.released.monotonic - begin) / column))
        for name in span.ids:
            rows[name][first:last] = _LETTERS[place % len(_LETTERS)] * (min(last, width) - first)
    longest = max(map(len, ids))
    return [f"{name:<{longest}}  {''.join(row)}" for name, row in rows.items()]
