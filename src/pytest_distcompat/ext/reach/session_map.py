"""Tracing of ranks, and the map that is written at the end of the session.

The ranks of all workers write what they executed into the store; the map is made from that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.ext.reach import tracer
from pytest_distcompat.plugin.rank_coverage import patched_by_coverage

if TYPE_CHECKING:
    from pytest_distcompat.plugin.session import DistcompatSession


class TracedRanks:
    """Hooks that have the ranks of suites traced, registered in each process that starts ranks."""

    def pytest_distcompat_preload(self) -> list[str]:
        """Have fork servers import what a tracer needs."""
        return ["coverage", tracer.__name__]

    def pytest_distcompat_recorders(self) -> list[str]:
        """Have each rank make its tracer."""
        return [f"{tracer.__name__}:{tracer.rank_tracer.__name__}"]


class SessionMap:
    """Hooks that write the map to a file, registered in the process that has the terminal."""

    def __init__(self, session: DistcompatSession, path: Path) -> None:
        self.session = session
        self.path = path
        self._lines: list[str] = []

    def pytest_collection_finish(self) -> None:
        """Refuse a second tracer on ranks, in a session without xdist."""
        _refuse_second_tracer()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self) -> None:
        """Refuse it under xdist: an error of a worker would be one of xdist."""
        _refuse_second_tracer()

    # tryfirst: pytest's own hook removes its temporary directories, and with them the store.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the map of all runs."""
        path = self.path
        runs = self.session.store_path / "runs"
        if session.config.option.collectonly:
            return
        if not runs.is_dir():
            self._lines.append(f"reach: no cell of a suite ran; {path} was not written")
            return
        from pytest_distcompat.ext.reach.collect import collect
        from pytest_distcompat.ext.reach.store import write_map
        from pytest_distcompat.ext.reach.text import headline

        reach_map = collect(sorted(runs.iterdir()))
        try:
            write_map(path, reach_map)
        except OSError as error:
            self._lines.append(f"reach: {path} could not be written: {error.strerror}")
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            self._lines += [
                f"reach: {headline(reach_map)}",
                f"reach: {path}, shown by: distcompat reach {path}",
            ]

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print where the map is."""
        for line in self._lines:
            terminalreporter.write_line(line)


def _refuse_second_tracer() -> None:
    """Raise pytest.UsageError if coverage measures ranks.

    A process has one trace function: the second would end the first.
    """
    if "subprocess" in (patched_by_coverage() or ()):
        raise pytest.UsageError(
            "--distcompat-reach: coverage measures ranks already ([run] patch = subprocess); "
            "expected no --cov beside it"
        )
