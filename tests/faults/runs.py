"""Output and durations of a pytest that ran faulty tests: see ``conftest.py``, which runs it."""

from __future__ import annotations

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

    #: Processes, files and leases that remained.
    leftovers: tuple[str, ...]
    #: The number of ranks of all its tests; 0 if each has its own.
    world_size: int = 0

    def lines(self, name: str) -> list[str]:
        """Return the report without the line in which xdist names its worker."""
        lines = str(self.of(name)["text"]).splitlines()
        if lines and lines[0].startswith("[gw"):
            return lines[1:]
        return lines

    def shows(self, name: str, first: str, *more: str) -> None:
        """Assert that the report begins with that line and has the others below, in this order."""
        lines = self.lines(name)
        pytest.LineMatcher(lines[:1]).fnmatch_lines([first])
        pytest.LineMatcher(lines).fnmatch_lines([first, *more])

    def causes(self, name: str) -> list[int]:
        """Return the ranks with a section of their own, in the order shown."""
        ranks: list[int] = []
        for line in self.lines(name):
            if line.startswith(("--- rank ", "--- ranks ")):
                title = line.partition(":")[0]
                ranks.extend(map(int, re.findall(r"\d+", title)))
        return ranks

    def consequences(self, name: str) -> set[int]:
        """Return the ranks that are folded under the cause."""
        _, _, folded = "\n".join(self.lines(name)).partition("\nconsequences:\n")
        return {int(line.split()[1]) for line in folded.splitlines() if line.startswith("  rank ")}

    def section(self, name: str, rank: int) -> str:
        """Return the report's section on that rank."""
        title = re.compile(r"^--- ranks? ([\d, and]+): ", re.MULTILINE)
        # Before the first title, then (ranks, text) of each section.
        _, *parts = title.split("\n".join(self.lines(name)))
        for ranks, text in zip(parts[::2], parts[1::2], strict=True):
            if str(rank) in re.findall(r"\d+", ranks):
                return text
        return ""

    def properties(self, name: str) -> dict[str, Any]:
        return dict(self.of(name)["properties"])

    def seconds(self, name: str) -> float:
        """Return the duration of that test, from the start of its setup to the end of its teardown."""
        durations = []
        for report in self.reports:
            if "when" in report and report["nodeid"].partition("::")[2] == name:
                durations.append(report["duration"])
        return float(sum(durations))

    def warming(self, name: str) -> float:
        """Return the seconds that this test may take longer because a process warms up.

        That is its own process, or another worker's, which has the CPU slots meanwhile: workers of xdist warm up at the
        same time, but not equally fast.
        """
        first_tests = self.first_of_processes
        if name in first_tests or len(first_tests) > 1:
            return 2 * self.seconds("test_well")
        return 0.0

    def waits(self, seconds: float) -> float:
        """Return the limit for a test that needs these seconds: it may wait for ranks of each other worker first.

        A core has two CPU slots, and whoever asks first gets them first.
        """
        return seconds * max(1, len(self.first_of_processes))

    @property
    def first_of_processes(self) -> set[str]:
        """Return the tests that came first in pytest's process, or in the processes of xdist's workers."""
        first_by_process: dict[int, str] = {}
        for report in self.reports:
            if "process" in report:
                first_by_process.setdefault(report["process"], report["nodeid"].partition("::")[2])
        return set(first_by_process.values())

    @property
    def outcomes(self) -> dict[str, str]:
        """The outcomes of all tests but those around faults."""
        return {name: end for name, end in super().outcomes.items() if not name.startswith(NEIGHBOUR)}

    @property
    def processes(self) -> dict[str, dict[int, int]]:
        """By test, in order, the process of each rank; only where ranks are reused."""
        file = self.directory / "processes.jsonl"
        if not file.exists():
            return {}
        process_by_rank: dict[str, dict[int, int]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            process_by_rank.setdefault(record["name"], {})[record["rank"]] = record["process"]
        return process_by_rank

    def shows_used_ranks(self, *well: str) -> None:
        """Assert that each fault was in the processes of the test before it, and the test after it in new ones.

        After a test that all ranks ran to its end the processes stay. ``well`` names such tests among those that did not
        pass.
        """
        assert self.shares_ranks
        processes = self.processes
        order = list(processes)
        faulty = [name for name in order if not name.startswith((NEIGHBOUR, "test_well"))]
        assert set(faulty) == {name for name in self.outcomes if not name.startswith("test_well")}
        for name in faulty:
            position = order.index(name)
            before, after = order[position - 1], order[position + 1]
            assert self.outcome(before) == "passed", name
            assert self.outcome(after) == "passed", name
            # A rank that a mark skips has no fixtures, and reports nothing.
            assert processes[name].items() <= processes[before].items(), name
            kept = set(processes[before].values()) & set(processes[after].values())
            ran_to_its_end = self.outcome(name) in {"passed", "skipped"} or name in well
            assert bool(kept) == ran_to_its_end, name

    def collectives_before(self, name: str) -> int:
        """Return the number of collectives in the default process group before the test's own.

        Fresh ranks have the fixture's barrier. Reused ranks have two of each test before this one.
        """
        processes = self.processes
        order = list(processes)
        if name not in order:
            return 1
        ranks = processes[name].items()
        earlier = order[: order.index(name)]
        on_same_ranks = [other for other in earlier if ranks <= processes[other].items()]
        return 2 * len(on_same_ranks)

    @property
    def shares_ranks(self) -> bool:
        """Return whether its tests share ranks, which then end with pytest and not with a test."""
        return "reuse session" in self.out

    @property
    def leftovers_by_test(self) -> dict[str, list[str]]:
        """By test, the processes that it started and that outlived it.

        The first test of each process does not count, since it warms up.
        """
        warm: set[int] = set()
        leftovers = {}
        for report in self.reports:
            if report.get("left") and report["process"] in warm:
                leftovers[report["nodeid"]] = report["left"]
            warm.add(report.get("process", 0))
        return leftovers
