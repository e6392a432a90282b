"""Output and log records of a suite's ranks: as sections of an item's report, or printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.launch.ending import name_ranks
from pytest_distcompat.launch.files import written
from pytest_distcompat.launch.request import Request
from pytest_distcompat.plugin.marked.outcome import SECTION_CHARACTERS


def sections(runs: Mapping[Path, str]) -> list[tuple[str, str]]:
    """Return a section for what each rank of these runs wrote; ranks that wrote the same share one.

    Args:
        runs: The directories of the runs, each with the name of its run.
    """
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for directory, name in runs.items():
        request = directory / "request.json"
        # A run that follows one which failed never began.
        for rank in range(Request.read(request).world_size if request.exists() else 0):
            for kind, text in written(directory, rank):
                ranks.setdefault((kind, name, text), []).append(rank)
    return [
        (f"Captured {kind} of {name} ({name_ranks(numbers)})", excerpt(text, SECTION_CHARACTERS))
        for (kind, name, text), numbers in ranks.items()
    ]
