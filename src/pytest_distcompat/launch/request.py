"""Requests to the ranks, and the log in which each rank answers: files, because stdout belongs to the tests."""

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
from pytest_distcompat.launch import deaths, pristine_builtins


@dataclass(frozen=True)
class Request:
    """One run: what to call on every rank, and where its files go.

    Attributes:
        target: ``module:function``, called with ``payload`` and the rank's log.
        payload: Plain data for the target.
        world_size: The number of ranks.
        directory: Where the request, the ranks' logs and their output are written.
        timeout: The time limit, in seconds.
        set: Environment variables that the rank needs set, to have the environment of the process that sends the request.
        unset: Environment variables that it needs unset for that.
        cwd: The rank's working directory.
        argv: Its command line.
        import_path: What it imports from.
        collected: The test module, collected beforehand, whose tests the ranks run: ``ANY_MODULE`` for several, empty for none.
        turn: Says by its parity from which of the warm interpreters rank 0 comes; runs that follow each other count it up.
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
        """Return the request with this process's command line, ``sys.path`` and, if it has none, working directory."""
        return dataclasses.replace(
            self, cwd=self.cwd or str(Path.cwd()), argv=tuple(map(str, sys.argv)), import_path=import_path()
        )

    @property
    def path(self) -> Path:
        """The file that holds this request."""
        return Path(self.directory) / "request.json"

    def write(self) -> Path:
        """Write the request to its file, and return the file. The directory is made if need be."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.line, encoding="utf-8")
        return self.path

    @classmethod
    def read(cls, path: str | Path) -> Request:
        """Return the request in that file."""
        return cls.from_line(Path(path).read_text(encoding="utf-8"))

    @functools.cached_property
    def line(self) -> str:
        """The request as a line of JSON; made once, for all ranks and the file."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Request:
        """Return the request of which that is the ``line``."""
        return cls(**json.loads(line))

    def command(self) -> str:
        """Return the command line that runs this one run alone, without pytest and without a fork server."""
        rank = f"-m pytest_distcompat.launch.rank {shlex.quote(str(self.path))} --by-hand"
        # torchrun starts its ranks without the flags of its own Python.
        python = f"--no-python {shlex.join(interpreter())} -u " if len(interpreter()) > 1 else ""
        return f"torchrun --standalone --nproc-per-node {self.world_size} {python}{rank}"


#: ``Request.collected``, if the ranks run tests of several modules.
ANY_MODULE = "*"


def interpreter() -> list[str]:
    """Return the command of this interpreter with the flags of its command line (``-W error``, ``-X dev``, ``-O``).

    Settings in the environment (``PYTHONWARNINGS``) are inherited anyway.
    https://docs.python.org/3/library/sys.html#sys.orig_argv
    """
    command = [sys.executable]
    arguments = iter(sys.orig_argv[1:])
    # Letters without a value, then perhaps one with a value: the rest of the argument, or the next one.
    while (found := re.fullmatch(r"-([^-\sWXmc]*)(?:([WXmc])(.*))?", next(arguments, ""), re.DOTALL)) is not None:
        letters, valued, value = found.groups("")
        # A rank must not stay at a prompt (-i).
        command += [f"-{letter}" for letter in letters if letter != "i"]
        if valued in {"m", "c"}:
            break
        if valued:
            command += [f"-{valued}", value or next(arguments, "")]
    return command


@dataclass(frozen=True)
class Warmth:
    """What the fork servers have ready: imported modules, and the result of one call.

    Attributes:
        modules: What is imported.
        named: Those of the modules that the user named. The user gets a notice if one cannot be imported; whether others can
            depends on what is installed.
        call: The function that is called, as ``module:function``.
        payload: Plain data for the function.
        path: Entries of ``sys.path`` besides the interpreter's own: pytest finds modules in directories that it adds itself.
        own: Files that are installed and yet the user's own code.
        timeout: How long all that may take, in seconds.
    """

    modules: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    call: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    timeout: float = 600.0


def import_path() -> tuple[str, ...]:
    """Return the directories that this process imports from.

    pytest adds some to Python's own (rootdir, conftest.py, the ini key pythonpath). A ``Path``, as some conftest adds it, is left
    out: Python ignores it.
    """
    return tuple(entry for entry in sys.path if entry and isinstance(entry, str))


def extend_import_path(entries: Sequence[str]) -> None:
    """Import from these directories too, after those that this process imports from already.

    But not from the working directory, unless it is among them: Python puts it first in a process that was started with -c, and
    then torch would import a cmd.py or profile.py that lies there.
    """
    sys.path[:] = filter(None, dict.fromkeys((*sys.path, *entries)))


class RankLog:
    """The log of one rank: one JSON line for each event, written at once, so that a killed rank leaves all its events.

    Times are CLOCK_MONOTONIC, which all processes of a machine share, so that they order events across ranks.

    Args:
        directory: The directory of the request.
        rank: The rank.
        by_hand: Whether a user runs the run again and looks at a terminal: the log starts afresh, and errors are shown.
        debugged: The rank in which the user wants a debugger, in a run by hand.
    """

    def __init__(self, directory: str | Path, rank: int, *, by_hand: bool = False, debugged: int | None = None) -> None:
        self.path = Path(directory) / f"rank-{rank}.jsonl"
        self.rank = rank
        self.by_hand = by_hand
        self.debugged = debugged
        # Duplicated now: a test's capture may have replaced stderr when the error comes.
        self._terminal = os.dup(2) if by_hand else None
        if by_hand:
            self.path.unlink(missing_ok=True)
        self._file = pristine_builtins.open_descriptor(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def write(self, event: str, **data: Any) -> None:
        """Append one event."""
        more = {"oom_kills": deaths.out_of_memory_kills()} if event == "start" else {}
        known = {"event": event, "rank": self.rank, "time": clock.now(), "memory": deaths.resident_memory()}
        line = pristine_builtins.encode({**known, **more, **data}) + "\n"
        raw = line.encode("utf-8", "surrogatepass")
        while raw:
            raw = raw[pristine_builtins.write_to(self._file, raw) :]

    def error(self, kind: str, message: str, text: str, **data: Any) -> None:
        """Append the last event of a failing rank: the exception's type, its message, and the whole text to show."""
        self.write("error", kind=kind, message=message, text=text, **data)
        if self._terminal is not None:
            shown = f"\nrank {self.rank}: {message}\n{text}\n".encode("utf-8", "replace")
            pristine_builtins.write_to(self._terminal, shown)

    def close(self) -> None:
        """Close the log."""
        for descriptor in (self._file, self._terminal):
            if descriptor is not None:
                pristine_builtins.close_descriptor(descriptor)


def read_events(directory: str | Path, rank: int, *, skip: str = "") -> list[dict[str, Any]]:
    """Return what that rank has logged so far.

    A line that is no event is dropped: a dying rank left it unfinished, or a test wrote there.

    Args:
        directory: The directory of the request.
        rank: The rank.
        skip: The name of events that are left out without decoding them, which saves time in a caller that reads often.
    """
    try:
        with pristine_builtins.open_file(f"{directory}/rank-{rank}.jsonl", encoding="utf-8", errors="replace") as file:
            raw = file.read()
    except FileNotFoundError:
        return []
    # The beginning of a line of ``RankLog.write``.
    skipped = pristine_builtins.encode({"event": skip})[:-1] if skip else "\n"
    events: list[dict[str, Any]] = []
    for line in raw.splitlines():
        if line.startswith(skipped):
            continue
        with contextlib.suppress(ValueError):
            event = pristine_builtins.decode(line)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
    return [event for event in events if _is_of_the_rank(event, events[0])]


def _is_of_the_rank(event: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Tell whether the rank itself wrote an event.

    A forked child writes ``done`` to the same file, while the rank may be gone without it.
    """
    return event["event"] != "done" or event.get("pid") in {None, start.get("pid")}


def read_end(path: Path, limit: int, since: int = 0) -> str:
    """Return the last bytes of a file as text; empty if there is no such file.

    Args:
        path: The file.
        limit: How many bytes at most.
        since: Only what came after so many bytes.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(since, file.tell() - limit))
        return file.read().decode("utf-8", "replace")
    return ""


TERMINAL = frozenset({"done", "error"})
#: The event of a rank that has left its test as the test allows (a skip, an expected failure) and waits for the others' end, and
#: the event of a rank that then goes on with them. If the first is a rank's last event, it counts as an error of that ``kind``.
EXCUSED, RESUMED = "excused", "resumed"


def pids_of(events_by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> dict[int, int]:
    """Return the process numbers of the ranks that started, which is the first event that a rank logs."""
    started = {rank: events[0] for rank, events in enumerate(events_by_rank) if events}
    return {rank: int(event["pid"]) for rank, event in started.items() if event["event"] == "start"}


def is_excused(events: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the rank waits for the others' end, or did so to its own."""
    return bool(events) and events[-1]["event"] == EXCUSED


def has_ended(events: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the rank has logged its last event."""
    return any(event["event"] in TERMINAL for event in events)
