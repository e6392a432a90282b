"""Read the reports of a pytest that ran in its own process, as ``pytest_recorder`` wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Put before the arguments of such a pytest. pytest-randomly would shuffle what a test expects in order. The plugin of
#: hypothesis imports all of hypothesis: half a second here, and again in the fork server.
RECORDED = ("-p", "tests.pytest_recorder", "-p", "no:randomly", "-p", "no:hypothesispytest")


def reports(directory: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the recorder's lines in that directory, in order; the last line of a killed process may be cut."""
    file = directory / "reports.jsonl"
    if not file.exists():
        return ()
    complete = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            complete.append(json.loads(line))
        except ValueError:
            continue
    return tuple(complete)


def _end(report: Mapping[str, Any]) -> str:
    if report["xfail"] is None:
        return str(report["outcome"])
    return "xfailed" if report["outcome"] == "skipped" else "xpassed"


def _test_name(report: Mapping[str, Any]) -> str:
    """Return the node id without the file."""
    return str(report["nodeid"].partition("::")[2])


@dataclass(frozen=True)
class Run:
    """Result of one pytest process."""

    code: int
    out: str
    directory: Path
    reports: tuple[Mapping[str, Any], ...]

    def of(self, name: str) -> Mapping[str, Any]:
        """Return the report with the outcome of the test of that name (all after the file)."""
        candidates = [report for report in self._outcome_reports if _test_name(report) == name]
        assert candidates, f"no test {name}:\n{self.out}"
        # A subtest fails its test; if all pass, the outcome is the test's own.
        return min(candidates, key=lambda report: (report["outcome"] != "failed", report["subtest"]))

    def outcome(self, name: str) -> str:
        return _end(self.of(name))

    @property
    def ends(self) -> dict[str, list[str]]:
        """By the whole name of each test how its call ended, and each other phase and subtest that did not pass."""
        ends_by_nodeid: dict[str, list[str]] = {}
        for report in self._outcome_reports:
            if report["subtest"] and report["outcome"] == "passed":
                continue
            ends_by_nodeid.setdefault(report["nodeid"], []).append(_end(report))
        return ends_by_nodeid

    @property
    def outcomes(self) -> dict[str, str]:
        names = [_test_name(report) for report in self._outcome_reports]
        return {name: self.outcome(name) for name in names}

    @property
    def _outcome_reports(self) -> list[Mapping[str, Any]]:
        """Reports with the outcome of a test: of the call, and of what did not pass."""
        phases = [report for report in self.reports if "when" in report]
        return [report for report in phases if report["when"] == "call" or report["outcome"] != "passed"]


def temporaries(directory: Path) -> set[str]:
    """Return the names of what is left in a temporary directory.

    Torch's cache of compiled kernels does not count: it stays on purpose.
    """
    return {path.name for path in directory.iterdir() if not path.name.startswith("torchinductor_")}
