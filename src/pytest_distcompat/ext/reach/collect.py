"""The map of a session, made from the files that its ranks wrote.

``session_map`` calls ``collect`` at the end of a session. Each *rank*, a process that trained, has
written which lines it executed in which *action*, such as ``build`` (``tracer``). Those line
numbers become functions and branches of the installed files (``analysis``), and all ranks together
the *map* (``map``).
"""

from __future__ import annotations

import contextlib
import gc
import json
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_distcompat.ext.reach.analysis import AnalysedFile
from pytest_distcompat.ext.reach.branches import SourceFile
from pytest_distcompat.ext.reach.libraries import FileId, installed_files, installed_versions
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.rank_files import reach_files
from pytest_distcompat.installed import version_of


def collect(directories: Iterable[Path]) -> ReachMap:
    """Return the map of all runs; its files are those of the libraries that are installed here.

    Args:
        directories: The directory of each run (one process group from start to end).
    """
    analysed: dict[FileId, AnalysedFile] = {}
    files: dict[FileId, SourceFile] = {}
    with _without_garbage_collection():
        for path, file_id in installed_files().items():
            analysed[file_id] = AnalysedFile(path, file_id)
            files[file_id] = analysed[file_id].file
    reach_map = ReachMap({**installed_versions(), **_tools()}, files)
    for directory in directories:
        for path in reach_files(directory):
            _add_rank(reach_map, path, analysed)
    return reach_map


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running.

    The syntax trees of some hundred files stay in use, and the collector would go through all of
    them again and again: that took 6 of 16 seconds (Python 3.11).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tools() -> dict[str, str]:
    """Return the versions of Python and coverage, which decide what is recorded."""
    return {"python": platform.python_version(), "coverage": version_of("coverage") or ""}


def _add_rank(reach_map: ReachMap, path: Path, analysed: dict[FileId, AnalysedFile]) -> None:
    """Add what a rank executed, from the file that its tracer wrote.

    The file has the arcs, pairs of line numbers, by action and by the number of a file in
    ``files``. A rank that went from line 12 to 13 and from 13 to 15 in the action ``build``::

        {"driver": "accelerate", "cell": "fsdp2-fp32-w2", "files": [["accelerate", "state.py"]],
         "actions": {"build": {"0": [12, 13, 13, 15]}}}
    """
    written = json.loads(path.read_text(encoding="utf-8"))
    file_ids = [FileId(library, name) for library, name in written["files"]]
    for action, lines_by_file in written["actions"].items():
        context = Context(written["driver"], written["cell"], action)
        for number, lines in lines_by_file.items():
            file_id = file_ids[int(number)]
            # ``installed_files`` leaves out some directories, which the tracer traces too. And a
            # rank of another machine may have another release, with other files.
            if file_id not in analysed:
                continue
            starts = lines[::2]
            ends = lines[1::2]
            arcs = zip(starts, ends, strict=True)
            reach_map.add(file_id, context, analysed[file_id].executed(arcs))
