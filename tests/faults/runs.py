"""Output and durations of a pytest that ran faulty tests: see ``conftest.py``, which runs it."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from tests.pytest_runs import Run as RunOfPytest

#: How the tests of faults_neighbours.py are called.
NEIGHBOUR = "test_neighbour["


@dataclass(frozen=True)
class Run(RunOfPytest):
    """Output of a pytest that ran faulty tests, and its leftovers."""

    leftovers: tuple[str, ...]
    #: Of all its tests; 0, where each has its own.
    world_size: int = 0

    def lines(self, name: str) -> list[str]:
        """Return the report without the line in which xdist names its worker."""
        lines = str(self.of(name)["text"]).splitlines()
        return lines[1:] if lines and lines[0].startswith("[gw") else lines

    def shows(self, name: str, first: str, *more: str) -> None:
        """The report begins with that line and has the others, in this order, somewhere below."""
        lines = self.lines(name)
        pytest.LineMatcher(lines[:1]).fnmatch_lines([first])
        pytest.LineMatcher(lines).fnmatch_lines([first, *more])

    def causes(self, name: str) -> list[int]:
        """The ranks with a section of their own, in the order shown."""
        titles = [line.partition(":")[0] for line in self.lines(name) if line.startswith(("--- rank ", "--- ranks "))]
        return [int(rank) for title in titles for rank in re.findall(r"\d+", title)]

    def consequences(self, name: str) -> set[int]:
        """The ranks that are folded under the cause."""
        _, _, folded = "\n".join(self.lines(name)).partition("\nconsequences:\n")
        return {int(line.split()[1]) for line in folded.splitlines() if line.startswith("  rank ")}

    def section(self, name: str, rank: int) -> str:
        """Return the report's section on that rank."""
        parts = re.split(r"^--- ranks? ([\d, and]+): ", "\n".join(self.lines(name)), flags=re.MULTILINE)[1:]
        shown = zip(parts[::2], parts[1::2], strict=True)
        return next((text for ranks, text in shown if str(rank) in re.findall(r"\d+", ranks)), "")

    def properties(self, name: str) -> dict[str, Any]:
        return dict(self.of(name)["properties"])

    def seconds(self, name: str) -> float:
        """How long that test took, from the start of its setup to the end of its teardown."""
        found = [report for report in self.reports if "when" in report and report["nodeid"].partition("::")[2] == name]
        return float(sum(report["duration"] for report in found))

    def warming(self, name: str) -> float:
        """How long that test may take because a process warms up: its own, or that of a worker which has the CPU slots meanwhile.

        Workers of xdist warm up at one time, beside each other, and not at one speed.
        """
        first = self.first_of_processes
        return 2 * self.seconds("test_well") if name in first or len(first) > 1 else 0.0

    def waits(self, seconds: float) -> float:
        """How long a test may take that is to take so long: a worker of xdist may wait for ranks of each of the others first.

        There are two CPU slots to a core, and whoever asks first gets them first.
        """
        return seconds * max(1, len(self.first_of_processes))

    @property
    def first_of_processes(self) -> set[str]:
        """The tests that came first in pytest's process, or in the processes of xdist's workers."""
        by_name: dict[int, str] = {}
        for report in self.reports:
            if "process" in report:
                by_name.setdefault(report["process"], report["nodeid"].partition("::")[2])
        return set(by_name.values())

    @property
    def outcomes(self) -> dict[str, str]:
        """But for those of the tests that stand around faults."""
        return {name: end for name, end in super().outcomes.items() if not name.startswith(NEIGHBOUR)}

    @property
    def processes(self) -> dict[str, dict[int, int]]:
        """By test, in order: by rank its process. Where ranks are reused."""
        by_name: dict[str, dict[int, int]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.directory / "processes.jsonl").read_text(encoding="utf-8").splitlines():
                one = json.loads(line)
                by_name.setdefault(one["name"], {})[one["rank"]] = one["process"]
        return by_name

    def shows_used_ranks(self, *well: str) -> None:
        """Each fault was in processes that had done the test before it; the test after it was in others, unless all was well.

        ``well`` are tests that did not pass, and that all ranks ran to their ends.
        """
        assert self.shares_ranks
        order = list(self.processes)
        faulty = [name for name in order if not name.startswith((NEIGHBOUR, "test_well"))]
        assert set(faulty) == {name for name in self.outcomes if not name.startswith("test_well")}
        for name in faulty:
            before, here, after = order[order.index(name) - 1 : order.index(name) + 2]
            assert (self.outcome(before), self.outcome(after)) == ("passed", "passed"), name
            # A rank that a mark skips has no fixtures, and reports nothing.
            assert self.processes[here].items() <= self.processes[before].items(), name
            same = set(self.processes[before].values()) & set(self.processes[after].values())
            assert bool(same) == (self.outcome(name) in {"passed", "skipped"} or name in well), name

    def collectives_before(self, name: str) -> int:
        """How many there were in the default process group: the fixture's barrier, and on reused ranks two of each test before."""
        order = list(self.processes)
        if name not in order:
            return 1
        here = self.processes[name].items()
        return 2 * sum(here <= self.processes[other].items() for other in order[: order.index(name)])

    @property
    def shares_ranks(self) -> bool:
        """Return whether its tests share ranks, which then end with pytest and not with a test."""
        return "reuse session" in self.out

    @property
    def leftovers_by_test(self) -> dict[str, list[str]]:
        """By test: processes that it started and that outlived it, but for each process's first test, which warms up."""
        seen: set[int] = set()
        by_name = {}
        for report in self.reports:
            if report.get("left") and report["process"] in seen:
                by_name[report["nodeid"]] = report["left"]
            seen.add(report.get("process", 0))
        return by_name
