"""Names and contents of the files that the ranks of a run write: output, logging, recordings.

A run is one process group from start to end, with a directory of its own. Of rank 1 it has, beside
the log of events ``rank-1.jsonl`` (``rank_log``):

- ``logs/.../attempt_0/1/stdout.log`` and ``stderr.log``: its output, which torchrun's agent (it
  starts and watches the ranks) redirects to them;
- ``rank-1.stdout.captured`` and ``rank-1.stderr.captured``: what pytest captured on that rank;
- ``rank-1.log``: records of the module ``logging``;
- ``recorded-reach-1.json``: what the recorder of an extension wrote;
- ``rank-1.stack`` and ``rank-1.recorder``: see ``forensics``.

The watchdog shows the ends of these files in the report of a failed run, by ``Files.output``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_distcompat.launch.forensics.stacks import without_launcher_in_crash

#: How many lines at the end of each file a report shows.
LINES_SHOWN = 40
#: How many bytes of a file are read for them: a crash writes up to a hundred frames, and the names
#: of all extension modules.
BYTES_READ = 60_000
#: The beginning of what faulthandler writes when a process crashes.
CRASH = "Fatal Python error: "


@dataclass(frozen=True)
class Files:
    """The files to which the ranks of a request write their output."""

    #: The directory of the run. Ranks that are reused for several requests, such as one test after
    #: the other, write to the files of the run that they were started with.
    run: Path
    #: For reused ranks, how many bytes each file had when the request began. They belong to earlier
    #: requests, and are not shown.
    since: Mapping[Path, int] = field(default_factory=dict)
    #: The first rank of this machine. torchrun's agent numbers its directories from 0 on each
    #: machine.
    first: int = 0

    def output(self, rank: int) -> str:
        """Return the last lines of each file that the rank wrote to.

        Each file has its own limit, so that a crash's stack in one of them does not hide the last
        lines of another.
        """
        lines: list[str] = []
        paths = [
            *captured_files(self.run, rank),
            *_logs(self.run, rank - self.first),
            log_file(self.run, rank),
        ]
        for path in paths:
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
    """Return how many bytes each stdout.log and stderr.log of that run's ranks has, by path.

    It is what ``Files.since`` has for a request that begins now.
    """
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
    """Return the file of an extension's recorder on a rank of a suite (``recording``).

    Args:
        run: The directory of the run.
        extension: The name of the extension, as ``reach``.
        rank: The rank.
    """
    return run / f"recorded-{extension}-{rank}.json"


def recorded_files(run: Path, extension: str = "*") -> list[Path]:
    """Return the files that recorders have written, by default those of all extensions."""
    return sorted(run.glob(f"recorded-{extension}-*.json"))


def remove_all_but_recorded(run: Path) -> None:
    """Remove what a run wrote, such as checkpoints, but not what recorders have written.

    Recordings are read when the session ends.
    """
    if not run.is_dir():
        return
    recorded = recorded_files(run)
    for path in run.iterdir():
        if path in recorded:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def written(run: Path, rank: int, first: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the end of what a rank of a suite wrote, as ``("stderr", "...")``.

    The names are ``stdout``, ``stderr`` and ``log``; one without any text is left out.

    Args:
        run: The directory of the run.
        rank: The rank.
        first: The first rank of its machine.
    """
    kinds = {path: path.stem for path in _logs(run, rank - first)}
    kinds[log_file(run, rank)] = "log"
    for path, kind in kinds.items():
        text = read_end(path, BYTES_READ)
        if text.strip():
            yield kind, text


def _logs(run: Path, rank: int) -> Iterator[Path]:
    """Yield the stdout.log and stderr.log of a rank, which may not exist.

    torchrun's agent makes a directory with a random name below ``logs`` each time it runs.

    Args:
        run: The directory of the run.
        rank: The number of the rank on its machine.
    """
    logs = run / "logs"
    attempts = sorted(logs.iterdir()) if logs.exists() else []
    for name in ("stdout.log", "stderr.log"):
        for attempt in attempts:
            yield attempt / "attempt_0" / str(rank) / name


def read_end(path: Path, limit: int, since: int = 0) -> str:
    """Return the last bytes of a file as text; empty if there is no such file.

    Args:
        path: The file.
        limit: How many bytes to read at most.
        since: How many bytes at the beginning to leave out in any case.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(since, file.tell() - limit))
        return file.read().decode("utf-8", "replace")
    return ""
