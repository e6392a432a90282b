"""``RankTracer``: records which lines of the libraries each action of a rank executes.

A *rank* is one of the processes that train together in a test. In a session with
``--distcompat-reach`` each rank of a suite calls ``rank_tracer`` (by its name, see
``session_map.TracedRanks``), then ``start``, ``switch`` at each *action*, such as ``build`` or
``step``, and ``stop``, which writes a file. ``collect`` makes the map from the files of all ranks.

A *driver* is the trainer under test, a *cell* its configuration, such as ``fsdp2-fp32-w2``.

The recording is coverage.py's, with an action as its *context*. It records *arcs*: the number of a
line, and that of the line that was executed next.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pytest_distcompat.ext.reach.libraries import FileId, installed_libraries
from pytest_distcompat.ext.reach.rank_files import reach_file
from pytest_distcompat.recording import RecordedRank

#: What is executed before the first action of a rank (the trainer's driver is made) and after its
#: last (the process group is left) is recorded under these names.
BEFORE, AFTER = "start", "end"
#: Warnings that coverage would print to the rank's stderr: that nothing was executed, which is no
#: problem here; that contexts are incomplete with sys.monitoring, which ``restart_monitoring``
#: prevents; and, in two forms, that a library was imported before coverage began to trace.
_WARNINGS = ["no-data-collected", "no-sysmon-context", "module-not-measured", "already-imported"]


def kind_of_action(action: str) -> str:
    """Return an action without its arguments: ``call step`` for ``call step(clip='no')``."""
    return action.partition("(")[0]


class RankTracer:
    """Traces this process from ``start`` to ``stop``, which writes the rank's file.

    coverage traces with ``sys.monitoring`` from Python 3.14 on, before that with a tracer in C:
    https://coverage.readthedocs.io/en/latest/config.html#run-core.

    Args:
        driver: The driver's name, such as ``accelerate``.
        cell: The test configuration, such as ``fsdp2-fp32-w2``.
        path: The file to write.
    """

    def __init__(self, driver: str, cell: str, path: Path) -> None:
        from coverage import Coverage

        self._head = {"driver": driver, "cell": cell}
        self._path = path
        self._libraries = installed_libraries()
        # Patterns, because a list of all files would delay the start of a rank by half a second.
        # ``library.parts`` has those of the library's training code. coverage reads them as pathlib
        # does.
        patterns: list[str] = []
        for library, directory in self._libraries.items():
            patterns += [f"{directory}/{part}" for part in library.parts]
        self._coverage = Coverage(data_file=None, config_file=False, branch=True, include=patterns)
        self._coverage.set_option("run:disable_warnings", _WARNINGS)

    def start(self) -> None:
        """Begin to trace; what is executed before the first action is recorded as ``BEFORE``."""
        self._coverage.start()
        self.switch(BEFORE)

    def switch(self, action: str) -> None:
        """Record what is executed from now on under this action; empty after the last one."""
        # coverage is not stopped and started again: it would miss what a trainer with a loop of its
        # own executes in functions that it entered in an earlier action.
        self._coverage.switch_context(kind_of_action(action) or AFTER)
        restart_monitoring()

    def stop(self) -> None:
        """Stop to trace, and write what each action executed."""
        self._coverage.stop()
        contents = {**self._head, **self._reached()}
        text = json.dumps(contents, separators=(",", ":"))
        # Renamed when it is complete, because a rank may be killed at any moment.
        partial = self._path.with_suffix(".part")
        partial.write_text(text, encoding="utf-8")
        partial.rename(self._path)

    def _reached(self) -> dict[str, Any]:
        """Return the contents of the rank's file.

        ``files`` are the library and path of each file. ``actions`` are the executed arcs by action
        and by the number of the file, as line numbers: from, to, from, to, and so on. For example

            {"files": [["accelerate", "state.py"]], "actions": {"build": {"0": [12, 13, 13, 15]}}}
        """
        data = self._coverage.get_data()
        names = sorted(data.measured_files())
        files: list[list[str]] = []
        for name in names:
            file_id = self._file_id(Path(name))
            files.append([file_id.library, file_id.path])
        actions: dict[str, dict[int, list[int]]] = {}
        for action in sorted(data.measured_contexts()):
            data.set_query_context(action)
            lines_by_file: dict[int, list[int]] = {}
            for number, name in enumerate(names):
                arcs = data.arcs(name)
                if not arcs:
                    # The action did not execute this file.
                    continue
                lines_by_file[number] = []
                for start, end in sorted(arcs):
                    lines_by_file[number] += [start, end]
            actions[action] = lines_by_file
        return {"files": files, "actions": actions}

    def _file_id(self, path: Path) -> FileId:
        """Return the library of a measured file, and the file's path in it."""
        for library, directory in self._libraries.items():
            if path.is_relative_to(directory):
                relative = path.relative_to(directory)
                return FileId(library.name, relative.as_posix())
        raise ValueError(f"{path} is in no traced library")


def rank_tracer(rank: RecordedRank) -> RankTracer:
    """Return the tracer of a rank of a suite."""
    return RankTracer(rank.driver, rank.cell, reach_file(rank.directory, rank.rank))


def restart_monitoring() -> None:
    """Let ``sys.monitoring`` report lines that an earlier action has executed already.

    With this core coverage turns the event of a line off once it has seen it, whatever the context:
    https://docs.python.org/3/library/sys.monitoring.html#sys.monitoring.restart_events.
    """
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None:
        monitoring.restart_events()
