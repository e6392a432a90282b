"""What the ranks of a request leave beside its logs: their output, and their stacks and records if they were asked for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_distcompat.launch.flight_recorder import record_file
from pytest_distcompat.launch.request import read_end
from pytest_distcompat.launch.stacks import stack_file, without_launcher_in_crash

#: The last lines of each file of a rank's output that a report shows.
TAIL = 40
#: How many bytes of it are looked at for them: a crash writes up to a hundred frames, and the names of all extension modules.
READ = 60_000
#: As faulthandler begins what it writes as a process crashes.
CRASH = "Fatal Python error: "


@dataclass(frozen=True)
class Files:
    """The files of the ranks that do a request.

    Ranks that live on write to those of the ``run`` that they were started with; ``since`` says how long its logs were
    when the request began.
    """

    run: Path
    since: Mapping[Path, int] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: str | Path) -> Files:
        """Of a request with ranks of its own."""
        return cls(Path(directory))

    def stack(self, rank: int) -> Path:
        """Where that rank writes its stacks when it is asked for them."""
        return stack_file(self.run, rank)

    def record(self, rank: int) -> Path:
        """Where that rank writes what torch recorded of collectives when it is asked for it."""
        return record_file(self.run, rank)

    def output(self, rank: int) -> str:
        """The last lines of each file that the rank wrote to: a crash's stack in one must not hide the last words in another."""
        lines: list[str] = []
        for path in (*captured_files(self.run, rank), *_logs(self.run, rank)):
            lines += _told(read_end(path, READ, self.since.get(path, 0)).splitlines())
        return "\n".join(lines)


def _told(lines: Sequence[str]) -> list[str]:
    """The last of them; of a crash the first: its innermost frames, where it happened."""
    begins = next((number for number, line in enumerate(lines) if line.startswith(CRASH)), len(lines))
    return [*lines[:begins][-TAIL:], *without_launcher_in_crash(lines[begins:])[:TAIL]]


def sizes(run: Path, world_size: int) -> dict[Path, int]:
    """How long the logs of that run's ranks are."""
    found = (path for rank in range(world_size) for path in _logs(run, rank))
    return {path: path.stat().st_size for path in found if path.exists()}


def captured_files(run: Path, rank: int) -> tuple[Path, Path]:
    """Where pytest on that rank captures what goes to stdout and stderr."""
    return run / f"rank-{rank}.stdout.captured", run / f"rank-{rank}.stderr.captured"


def _logs(run: Path, rank: int) -> Iterator[Path]:
    """As torchrun's agent lays them, below a directory for each of its runs."""
    logs = run / "logs"
    attempts = sorted(logs.iterdir()) if logs.exists() else []
    for name in ("stdout.log", "stderr.log"):
        for attempt in attempts:
            yield attempt / "attempt_0" / str(rank) / name
