"""The map of a session, from the files that its ranks wrote."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path

from pytest_distcompat.ext.reach.branches import AnalysedFile
from pytest_distcompat.ext.reach.libraries import FileId, installed_files, installed_versions
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.ext.reach.rank_files import reach_files
from pytest_distcompat.installed import version_of


def collect(directories: Iterable[Path]) -> ReachMap:
    """Return the map of all runs in these directories, on the files of the libraries that are installed here."""
    analysed = {file_id: AnalysedFile(path, file_id) for path, file_id in installed_files().items()}
    files = {file_id: one.file for file_id, one in analysed.items()}
    found = ReachMap({**installed_versions(), **_tools()}, files)
    for directory in directories:
        for path in reach_files(directory):
            _add_rank(found, path, analysed)
    return found


def _tools() -> dict[str, str]:
    return {"python": platform.python_version(), "coverage": version_of("coverage") or ""}


def _add_rank(found: ReachMap, path: Path, analysed: dict[FileId, AnalysedFile]) -> None:
    written = json.loads(path.read_text(encoding="utf-8"))
    names = [FileId(library, name) for library, name in written["files"]]
    for action, arcs_of in written["actions"].items():
        context = Context(written["driver"], written["cell"], action)
        for number, lines in arcs_of.items():
            file_id = names[int(number)]
            # A directory that is left out is traced too; another node may have another release,
            # with other files.
            if file_id in analysed:
                arcs = zip(lines[::2], lines[1::2], strict=True)
                found.add(file_id, context, analysed[file_id].executed(arcs))
