"""Hooks of a session with ``--distcompat-reach``: ranks are traced, and the map is written.

``plugin`` registers them. *Ranks*, the processes that train, are started by pytest's process, or
under xdist by its workers; ``TracedRanks`` has each of them write what it executed into the
session's store, a directory. In the end ``SessionMap``, in the process that has the terminal, makes
the *map* from these files: which test cells execute which functions of the libraries.
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
    """Hooks that write the map to a file, registered in the process that has the terminal.

    Args:
        session: The state of this plugin in the pytest session.
        path: The file of the map.
    """

    def __init__(self, session: DistcompatSession, path: Path) -> None:
        self.session = session
        self.path = path
        #: What to print at the end.
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
            # Nothing ran, and an earlier map in the file is to stay.
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
            # The user asked for the map, so its lack is a failure, unless there is a worse one.
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
