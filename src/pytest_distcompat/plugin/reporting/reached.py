"""The file of ``--distcompat-reach``: written at the end of a session, from what the ranks of all workers left in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.plugin.rank_coverage import refuse_second_tracer

if TYPE_CHECKING:
    from pytest_distcompat.plugin.session import DistcompatSession


class Reached:
    """Hooks that write the map, registered in the process that has the terminal."""

    def __init__(self, session: DistcompatSession) -> None:
        self.session = session
        self._lines: list[str] = []

    def pytest_collection_finish(self) -> None:
        """Refuse a second tracer on ranks, in a session without xdist."""
        refuse_second_tracer()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self) -> None:
        """Refuse it under xdist: an error of a worker would be one of xdist."""
        refuse_second_tracer()

    # tryfirst: pytest's own hook removes its temporary directories, and with them the store.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the map of all runs."""
        path = self.session.reach
        runs = self.session.store_path / "runs"
        if path is None or session.config.option.collectonly:
            return
        if not runs.is_dir():
            self._lines.append(f"reach: no cell of a suite ran; {path} was not written")
            return
        from pytest_distcompat.reach.collect import collect
        from pytest_distcompat.reach.store import write_map
        from pytest_distcompat.reach.text import headline

        found = collect(sorted(runs.iterdir()))
        try:
            write_map(path, found)
        except OSError as error:
            self._lines.append(f"reach: {path} could not be written: {error.strerror}")
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            self._lines += [f"reach: {headline(found)}", f"reach: {path}, shown by: distcompat reach {path}"]

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print where the map is."""
        for line in self._lines:
            terminalreporter.write_line(line)
