"""What is asked of the ranks, and the log in which each rank answers: files, since stdout belongs to the tests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import pristine_builtins


@dataclass(frozen=True)
class Request:
    """One run: what to call on every rank, and where its files go.

    ``target`` is ``module:function``, called with ``payload`` and the rank's log. ``directory`` holds the request, the
    ranks' logs and their output. ``set`` and ``unset`` bring the rank's environment to that of the process that asks,
    ``cwd``, ``argv`` and ``import_path`` its working directory, its command line and what it imports from.
    ``collected`` is the test module, collected beforehand, that the ranks run tests of: ``ANY_MODULE`` for several, empty for
    none. ``turn`` says by its parity from which of the warm interpreters rank 0 comes: runs that follow each other count it up.
    """

    target: str
    payload: Mapping[str, Any]
    world_size: int
    directory: str
    timeout: float = 300.0
    set: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()
    cwd: str = ""
    argv: Sequence[str] = ()
    import_path: Sequence[str] = ()
    collected: str = ""
    turn: int | None = None

    def from_here(self) -> Request:
        """The same, with this process's working directory, if none was said, its command line and its ``sys.path``."""
        return dataclasses.replace(
            self, cwd=self.cwd or str(Path.cwd()), argv=tuple(map(str, sys.argv)), import_path=import_path()
        )

    @property
    def path(self) -> Path:
        """The file that holds this request."""
        return Path(self.directory) / "request.json"

    def write(self) -> Path:
        """Store the request in its directory, made if need be."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.line, encoding="utf-8")
        return self.path

    @classmethod
    def read(cls, path: str | Path) -> Request:
        """The request in that file."""
        return cls.from_line(Path(path).read_text(encoding="utf-8"))

    @functools.cached_property
    def line(self) -> str:
        """The request as a line of JSON; made once, for all ranks and the file."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Request:
        """The request of which that is the ``line``."""
        return cls(**json.loads(line))

    def command(self) -> str:
        """The command line that runs this one run alone, without pytest and without a fork server."""
        rank = f"-m pytest_distcompat.launch.rank {shlex.quote(str(self.path))} --by-hand"
        # torchrun starts its ranks without the flags that Python was given.
        python = f"--no-python {shlex.join(interpreter())} -u " if len(interpreter()) > 1 else ""
        return f"torchrun --standalone --nproc-per-node {self.world_size} {python}{rank}"


#: Of a request whose ranks run tests of several modules.
ANY_MODULE = "*"


def interpreter() -> list[str]:
    """Return the command of this interpreter with the flags that its command line gave it (``-W error``, ``-X dev``, ``-O``).

    What the environment says to it (``PYTHONWARNINGS``) is inherited anyway.
    https://docs.python.org/3/library/sys.html#sys.orig_argv
    """
    command = [sys.executable]
    arguments = iter(sys.orig_argv[1:])
    # A cluster of letters without value, then perhaps one that has one: the rest, or the next argument.
    while (found := re.fullmatch(r"-([^-\sWXmc]*)(?:([WXmc])(.*))?", next(arguments, ""), re.DOTALL)) is not None:
        letters, valued, value = found.groups("")
        # To stay at a prompt is not for ranks.
        command += [f"-{letter}" for letter in letters if letter != "i"]
        if valued in {"m", "c"}:
            break
        if valued:
            command += [f"-{valued}", value or next(arguments, "")]
    return command


@dataclass(frozen=True)
class Warmth:
    """What the fork server has ready: imported ``modules``, and what ``call`` ("module:function") left behind.

    Those of the modules that the user ``named`` are told of if they cannot be imported; others depend on what is installed.

    ``path`` is what its ``sys.path`` has besides its own: pytest finds modules in directories that it adds itself.
    ``own`` are files that are installed and yet the user's own code.
    ``timeout`` is how long all that may take, in seconds.
    """

    modules: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    call: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    timeout: float = 600.0


def import_path() -> tuple[str, ...]:
    """What this process imports from: pytest adds directories to it (rootdir, conftest.py, the ini key pythonpath).

    Some conftest adds a ``Path``, which Python itself passes over.
    """
    return tuple(entry for entry in sys.path if entry and isinstance(entry, str))


def extend_import_path(entries: Sequence[str]) -> None:
    """Import from there too, after what this process imports from already.

    But not from the working directory, unless they say so: Python puts it first in a process that was started with -c, and
    then a cmd.py or profile.py that lies there is what torch imports.
    """
    sys.path[:] = filter(None, dict.fromkeys((*sys.path, *entries)))


class RankLog:
    """One rank's answers: a line of JSON each, written at once, so that a killed rank leaves all it said.

    Times are CLOCK_MONOTONIC, which all processes of a machine share, so that they order events across ranks.

    ``by_hand``: somebody runs the run again and looks at a terminal. The log starts afresh, and errors are shown there.
    """

    def __init__(self, directory: str | Path, rank: int, *, by_hand: bool = False) -> None:
        self.path = Path(directory) / f"rank-{rank}.jsonl"
        self.rank = rank
        # Kept now: a test's capture may have replaced it when the error comes.
        self.by_hand = by_hand
        self._terminal = os.dup(2) if by_hand else None
        if by_hand:
            self.path.unlink(missing_ok=True)
        self._file = pristine_builtins.open_descriptor(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def write(self, event: str, **data: Any) -> None:
        """Append one event."""
        line = pristine_builtins.encode({"event": event, "rank": self.rank, "time": clock.now(), **data}) + "\n"
        raw = line.encode("utf-8", "surrogatepass")
        while raw:
            raw = raw[pristine_builtins.write_to(self._file, raw) :]

    def error(self, kind: str, message: str, text: str, **data: Any) -> None:
        """The last thing a failing rank says: the exception's type, its message, and the whole text to show."""
        self.write("error", kind=kind, message=message, text=text, **data)
        if self._terminal is not None:
            shown = f"\nrank {self.rank}: {message}\n{text}\n".encode("utf-8", "replace")
            pristine_builtins.write_to(self._terminal, shown)

    def close(self) -> None:
        """Nothing more is to be said."""
        for descriptor in (self._file, self._terminal):
            if descriptor is not None:
                pristine_builtins.close_descriptor(descriptor)


def read_events(directory: str | Path, rank: int, *, but: str = "") -> list[dict[str, Any]]:
    """What that rank wrote so far. A line that is no event is dropped: a dying rank left it unfinished, or a test wrote there.

    Events called ``but`` are passed over unread: who looks five times a second need not decode what a probe saw.
    """
    try:
        with pristine_builtins.open_file(f"{directory}/rank-{rank}.jsonl", encoding="utf-8", errors="replace") as file:
            raw = file.read()
    except FileNotFoundError:
        return []
    # As ``RankLog.write`` begins it.
    passed = pristine_builtins.encode({"event": but})[:-1] if but else "\n"
    events: list[dict[str, Any]] = []
    for line in raw.splitlines():
        if line.startswith(passed):
            continue
        with contextlib.suppress(ValueError):
            event = pristine_builtins.decode(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
    return [event for event in events if _of_the_rank(event, events[0])]


def _of_the_rank(event: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Not so the last word of a forked child, which writes to the same file: the rank itself may be gone without one."""
    return event["event"] != "done" or event.get("pid") in {None, start.get("pid")}


def read_end(path: Path, most: int, since: int = 0) -> str:
    """The last ``most`` bytes of that file as text, of what came after ``since`` bytes; nothing of a file that is not there."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(since, file.tell() - most))
        return file.read().decode("utf-8", "replace")
    return ""


TERMINAL = frozenset({"done", "error"})
#: What a rank writes that has left its test as the test allows (a skip, an expected failure) and waits for what the others come
#: to; and what it writes when it goes on with them. As its last word the first is an error of that ``kind``.
EXCUSED, RESUMED = "excused", "resumed"


def pids_of(said: Sequence[Sequence[Mapping[str, Any]]]) -> dict[int, int]:
    """Of the ranks that started, their processes: the first thing that a rank says."""
    started = {rank: events[0] for rank, events in enumerate(said) if events}
    return {rank: int(event["pid"]) for rank, event in started.items() if event["event"] == "start"}


def is_excused(events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the rank waits for what the others come to, or did to its end."""
    return bool(events) and events[-1]["event"] == EXCUSED


def has_ended(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rank said its last word."""
    return any(event["event"] in TERMINAL for event in events)
