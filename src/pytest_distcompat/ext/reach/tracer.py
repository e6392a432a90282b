"""The tracer of a rank: which lines and branches of the stack each action executes, by the package coverage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.reach.libraries import FileId, installed_libraries
from pytest_distcompat.ext.reach.rank_files import reach_file
from pytest_distcompat.recording import RecordedRank

#: The actions before a rank's first one and after its last: the driver is made, the process group is left.
BEFORE, AFTER = "start", "end"
#: What coverage would say on the rank's stderr: nothing was executed, or that contexts are incomplete with sys.monitoring,
#: which ``restart_monitoring`` sees to.
_WARNINGS = ["no-data-collected", "no-sysmon-context", "module-not-measured", "already-imported"]


def kind_of_action(action: str) -> str:
    """Return an action without the arguments of a call: ``call step(clip='no')`` is ``call step``."""
    return action.partition("(")[0]


class RankTracer:
    """Traces this process from ``start`` to ``stop``, which writes the rank's file.

    coverage has two cores: from Python 3.14 on ``sys.monitoring``, before that its tracer in C.
    https://coverage.readthedocs.io/en/latest/config.html#run-core
    """

    def __init__(self, driver: str, cell: str, path: Path) -> None:
        from coverage import Coverage

        self._head = {"driver": driver, "cell": cell}
        self._path = path
        self._libraries = installed_libraries()
        # A pattern means to coverage what it means to pathlib. By all files' names a rank would begin half a second later.
        patterns = [
            f"{directory}/{part}"
            for library, directory in self._libraries.items()
            for part in library.parts
        ]
        self._coverage = Coverage(data_file=None, config_file=False, branch=True, include=patterns)
        self._coverage.set_option("run:disable_warnings", _WARNINGS)

    def start(self) -> None:
        """Begin to trace, in an action of its own before the first."""
        self._coverage.start()
        self.switch(BEFORE)

    def switch(self, action: str) -> None:
        """Record what is executed from now on for this action, an empty one after the last."""
        # Not by a stop and a start: a trainer whose loop reports its steps goes on in functions that it has entered before.
        self._coverage.switch_context(kind_of_action(action) or AFTER)
        restart_monitoring()

    def stop(self) -> None:
        """End the trace, and write what each action executed."""
        self._coverage.stop()
        text = json.dumps({**self._head, **self._reached()}, separators=(",", ":"))
        # Under this name it is whole: a rank may be killed at any moment.
        partial = self._path.with_suffix(".part")
        partial.write_text(text, encoding="utf-8")
        partial.rename(self._path)

    def _reached(self) -> dict[str, Any]:
        """Return the files, and for each action the arcs of each file, by its number: from, to, from, to and so on."""
        data = self._coverage.get_data()
        names = sorted(data.measured_files())
        files = [self._file_id(Path(name)) for name in names]
        actions: dict[str, dict[int, list[int]]] = {}
        for action in sorted(data.measured_contexts()):
            data.set_query_context(action)
            arcs_of: dict[int, list[int]] = {}
            for number, name in enumerate(names):
                arcs = data.arcs(name)
                if arcs:
                    arcs_of[number] = [line for arc in sorted(arcs) for line in arc]
            actions[action] = arcs_of
        return {"files": [[file.library, file.path] for file in files], "actions": actions}

    def _file_id(self, path: Path) -> FileId:
        library, directory = next(
            (library, directory)
            for library, directory in self._libraries.items()
            if path.is_relative_to(directory)
        )
        return FileId(library.name, path.relative_to(directory).as_posix())


def rank_tracer(rank: RecordedRank) -> RankTracer:
    """Return the tracer of a rank of a suite."""
    return RankTracer(rank.driver, rank.cell, reach_file(rank.directory, rank.rank))


def restart_monitoring() -> None:
    """Have ``sys.monitoring`` report again what it reported in the action before.

    coverage turns off the event of a line that it has seen once, for a line's context does not matter to it there.
    https://docs.python.org/3/library/sys.monitoring.html#sys.monitoring.restart_events
    """
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None:
        monitoring.restart_events()
