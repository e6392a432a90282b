"""The log of a rank: a line of JSON for each event.

Ranks report to pytest's process by files, because stdout belongs to the tests. Rank 1 writes to
``rank-1.jsonl`` in the run's directory, by ``RankLog`` (``rank`` opens it). Two lines, shortened::

    {"event": "start", "rank": 1, "time": 12.3, "memory": 812843008, "pid": 4711, "oom_kills": 0}
    {"event": "action", "rank": 1, "time": 12.4, "memory": 812843008, "action": "build", "index": 0}

pytest's process reads the logs of all ranks by ``LogReader``, again and again while they run
(``watchdog``). These lines become ``events.Start(pid=4711, oom_kills=0)`` and
``events.Action("build", 0)``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_distcompat import clock
from pytest_distcompat.events import Done, Error, Event, Note, decode_event
from pytest_distcompat.launch import pristine_builtins
from pytest_distcompat.launch.forensics import deaths


class RankLog:
    """The log that one rank writes.

    Each event is written at once, so that a killed rank leaves all its events. The functions are
    those of ``pristine_builtins``, because a test may have replaced ``open`` or ``os.write``.

    Args:
        directory: The run's directory.
        rank: The rank.
        by_hand: Whether a user repeats the run in a terminal. Then the log starts afresh, and
            errors are shown in the terminal too.
        debugged: The rank on which that user wants a debugger; None for no rank.
    """

    def __init__(
        self,
        directory: str | Path,
        rank: int,
        *,
        by_hand: bool = False,
        debugged: int | None = None,
    ) -> None:
        self.path = Path(directory) / f"rank-{rank}.jsonl"
        self.rank = rank
        self.by_hand = by_hand
        self.debugged = debugged
        #: The part of the action that the rank is in, as ``in rows() of the loader 'shuffle'``;
        #: empty if nobody has set it. ``rank.report_error`` puts it in the message of an error.
        self.doing = ""
        # Duplicated now: a test's capture may have replaced stderr when the error comes.
        self._terminal = os.dup(2) if by_hand else None
        if by_hand:
            self.path.unlink(missing_ok=True)
        self._file = pristine_builtins.open_descriptor(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def write(self, event: Event) -> None:
        """Append one event, with the rank, the time and the rank's memory."""
        # Classes of events have a name; a ``Note`` stands for an event without a class.
        name = event.event if isinstance(event, Note) else event.name
        fields = {
            "event": name,
            "rank": self.rank,
            "time": clock.now(),
            "memory": deaths.resident_memory(),
            **event.own_fields(),
        }
        line = pristine_builtins.encode(fields) + "\n"
        raw = line.encode("utf-8", "surrogatepass")
        # A write to a disk that is nearly full may write a part only.
        while raw:
            written = pristine_builtins.write_to(self._file, raw)
            raw = raw[written:]
        if isinstance(event, Error) and self._terminal is not None:
            shown = f"\nrank {self.rank}: {event.message}\n{event.text}\n"
            pristine_builtins.write_to(self._terminal, shown.encode("utf-8", "replace"))

    def close(self) -> None:
        """Close the log."""
        for descriptor in (self._file, self._terminal):
            if descriptor is not None:
                pristine_builtins.close_descriptor(descriptor)


class LogReader:
    """Reads the logs of several ranks; each line is read and decoded once.

    A line that is no event is dropped: a dying rank left it unfinished, or a test wrote there.
    """

    def __init__(self, directory: str | Path, ranks: Iterable[int]) -> None:
        self._paths: dict[int, str] = {}
        self._events: dict[int, list[Event]] = {}
        for rank in ranks:
            self._paths[rank] = f"{directory}/rank-{rank}.jsonl"
            self._events[rank] = []
        #: How much of each file has been read, by rank: its inode, and a number of bytes.
        self._positions: dict[int, tuple[int, int]] = {}

    def read(self) -> Mapping[int, Sequence[Event]]:
        """Return all events that the ranks have logged so far, by rank."""
        for rank in self._paths:
            with contextlib.suppress(FileNotFoundError):
                self._read_more(rank)
        return self._events

    def _read_more(self, rank: int) -> None:
        """Read the lines that a rank has written since the last call.

        A line that it has not finished is left for the next call.
        """
        with pristine_builtins.open_file(self._paths[rank], "rb") as file:
            inode = pristine_builtins.status_of(file.fileno()).st_ino
            known_inode, offset = self._positions.get(rank, (inode, 0))
            if known_inode != inode:
                # The file is another one than before: a later process of this rank has renamed the
                # log of the earlier one (``ext/scripts/hosted_rank``), whose events do not count.
                self._events[rank] = []
                offset = 0
            file.seek(offset)
            raw = file.read()
        finished = raw[: raw.rfind(b"\n") + 1]
        self._positions[rank] = inode, offset + len(finished)
        for line in finished.splitlines():
            with contextlib.suppress(ValueError):
                data = pristine_builtins.decode(line.decode("utf-8", "replace"))
                event = decode_event(data)
                if event is not None and not self._of_forked_child(rank, event):
                    self._events[rank].append(event)

    def _of_forked_child(self, rank: int, event: Event) -> bool:
        """Tell whether the event is a ``done`` that a forked child of the rank wrote.

        A child inherits the open file. Its ``done`` must not count as the rank's, which may have
        vanished without one.
        """
        if not isinstance(event, Done) or event.pid is None:
            return False
        # The first event of a rank is ``start``, with its pid.
        logged = self._events[rank]
        return not logged or event.pid != getattr(logged[0], "pid", None)


def read_events(directory: str | Path, rank: int) -> Sequence[Event]:
    """Return what that rank has logged so far."""
    return LogReader(directory, [rank]).read()[rank]
