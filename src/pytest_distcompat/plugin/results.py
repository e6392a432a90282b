"""Gathers the verdicts of all workers: the matrix in the terminal and the report file."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.plugin.options import OPTIONS
from pytest_distcompat.plugin.session import DistcompatSession
from pytest_distcompat.report import Result, Row, matrix_text, write_report

#: The attribute of a report that carries a verdict from an xdist worker to the controller.
ATTRIBUTE = "distcompat"

_VERSIONS = ("pytest-distcompat", "torch", "accelerate", "transformers", "deepspeed", "pytest")


def versions() -> dict[str, str]:
    """Versions of what is under test, without importing any of it."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Results:
    """Registered in the process that talks to the user."""

    def __init__(self, session: DistcompatSession) -> None:
        self.session = session
        self.found: dict[str, Result] = {}
        self.cells: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the verdict that a report carries."""
        data = getattr(report, ATTRIBUTE, None)
        if data is not None:
            more = {name: data[name] for name in ("blanks", "cost")}
            own = {name: value for name, value in data.items() if name not in more}
            result = self.found[data["nodeid"]] = Result(**own, seconds=report.duration)
            row = self.cells.setdefault(f"{result.place}:{result.cell}", Row(result.suite, result.driver, result.cell))
            row.blanks.update(more["blanks"])
            row.cost.update(more["cost"])

    def ordered(self) -> list[Result]:
        """In the order of the matrix, whichever worker was first and however the tests were shuffled."""
        from pytest_distcompat.checks import CHECKS
        from pytest_distcompat.precisions import PRECISIONS
        from pytest_distcompat.strategies import STRATEGIES

        strategies, precisions, checks = STRATEGIES.names(), PRECISIONS.names(), CHECKS.names()

        def place(result: Result) -> tuple[object, ...]:
            cell = Cell.parse(result.cell)
            axes = (strategies.index(cell.strategy), precisions.index(cell.precision), cell.world_size)
            return (result.suite, len(cell.options), str(cell.options), *axes, checks.index(result.check))

        return sorted(self.found.values(), key=place)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The matrix; and where the report went."""
        if not self.found:
            return
        from pytest_distcompat.runner import count_lives

        results = self.ordered()
        lives = count_lives(self.session.lives)
        terminalreporter.section("distributed compatibility")
        rows = list(self.cells.values())
        for line in matrix_text(results, rows):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"{len(results)} verdicts from {lives} process-group lives")
        path = self.session.setting("report").value
        if path is not None:
            write_report(path, results, self._run(lives), rows)
            terminalreporter.write_line(f"report: {path}")

    def _run(self, lives: int) -> dict[str, Any]:
        session = self.session
        names = [name.removeprefix("distcompat_") for name in OPTIONS]
        settings = {name: {"value": session.setting(name).text, "from": session.setting(name).origin} for name in names}
        return {
            "versions": versions(),
            "device": session.device,
            "world_size": session.world_size,
            "lives": lives,
            "settings": settings,
        }
