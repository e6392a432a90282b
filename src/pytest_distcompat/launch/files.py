"""Files that the ranks of a request write beside their logs.

They are output and, on request, stacks and records.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_distcompat.launch.forensics.stacks import without_launcher_in_crash

#: The last lines of each file of a rank's output that a report shows.
LINES_SHOWN = 40
#: How many bytes of a file are read for them: a crash writes up to a hundred frames, and the names
#: of all extension modules.
BYTES_READ = 60_000
#: The beginning of what faulthandler writes when a process crashes.
CRASH = "Fatal Python error: "


@dataclass(frozen=True)
class Files:
    """The files of the ranks that do a request.

    Ranks of an open run write to the files of the ``run`` that they were started with; ``since``
    says how long its logs were when the request began. The agent counts the ranks of its own node:
    ``first`` is the first rank here.
    """

    run: Path
    since: Mapping[Path, int] = field(default_factory=dict)
    first: int = 0

    def output(self, rank: int) -> str:
        """Return the last lines of each file that the rank wrote to.

        Of each: a crash's stack in one file must not hide the last lines of another.
        """
        lines: list[str] = []
        for path in (
            *captured_files(self.run, rank),
            *_logs(self.run, rank - self.first),
            log_file(self.run, rank),
        ):
            text = read_end(path, BYTES_READ, self.since.get(path, 0))
            before_crash, crash = _split_at_crash(text.splitlines())
            lines += before_crash[-LINES_SHOWN:]
            # Of a crash the first lines are shown, with the innermost frames, where it happened.
            lines += without_launcher_in_crash(crash)[:LINES_SHOWN]
        return "\n".join(lines)


def _split_at_crash(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the lines before the first crash that faulthandler reports, and those from it on."""
    for number, line in enumerate(lines):
        if line.startswith(CRASH):
            return lines[:number], lines[number:]
    return lines, []


def read_file(path: Path) -> str:
    """Return the text of a file; empty if the rank has made none."""
    if not path.exists():
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def log_sizes(run: Path, world_size: int) -> dict[Path, int]:
    """Return how long the logs of that run's ranks are, in bytes."""
    sizes = {}
    for rank in range(world_size):
        for path in _logs(run, rank):
            if path.exists():
                sizes[path] = path.stat().st_size
    return sizes


def captured_files(run: Path, rank: int) -> tuple[Path, Path]:
    """Return the files to which pytest on that rank captures stdout and stderr."""
    return run / f"rank-{rank}.stdout.captured", run / f"rank-{rank}.stderr.captured"


def log_file(run: Path, rank: int) -> Path:
    """Return the file with the log records of that rank for which no handler was configured."""
    return run / f"rank-{rank}.log"


def recorded_file(run: Path, extension: str, rank: int) -> Path:
    """Return the file of an extension's recorder on a rank of a suite.

    See ``recording``.
    """
    return run / f"recorded-{extension}-{rank}.json"


def recorded_files(run: Path, extension: str = "*") -> list[Path]:
    """Return the files that recorders have written, by default those of all extensions."""
    return sorted(run.glob(f"recorded-{extension}-*.json"))


def written(run: Path, rank: int, first: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the end of what a rank of a suite wrote, as (name, text).

    Names are ``stdout``, ``stderr`` and ``log``, of those that have any text. ``first`` is the
    first rank of the node.
    """
    kinds = {path: path.stem for path in _logs(run, rank - first)}
    kinds[log_file(run, rank)] = "log"
    for path, kind in kinds.items():
        text = read_end(path, BYTES_READ)
        if text.strip():
            yield kind, text


def _logs(run: Path, rank: int) -> Iterator[Path]:
    """Yield the logs of a rank.

    torchrun's agent puts them below a directory for each of its runs.
    """
    logs = run / "logs"
    attempts = sorted(logs.iterdir()) if logs.exists() else []
    for name in ("stdout.log", "stderr.log"):
        for attempt in attempts:
            yield attempt / "attempt_0" / str(rank) / name


def read_end(path: Path, limit: int, since: int = 0) -> str:
    """Return the last bytes of a file as text; empty if there is no such file.

    Only what came after ``since`` bytes is read.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(since, file.tell() - limit))
        return file.read().decode("utf-8", "replace")
    return ""
