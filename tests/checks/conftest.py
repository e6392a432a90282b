"""Fixtures with hand-made traces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.checks import more_runs, sound_runs
from tests.checks.traces import Sound, Story

from pytest_distcompat.cell import Cell


@pytest.fixture(scope="session")
def sound() -> Sound:
    """Return the sound story of a cell, by the cell's id."""

    def story(cell_id: str) -> Story:
        cell = Cell.parse(cell_id)
        return Story(cell, sound_runs.trace_of(cell), functools.partial(sound_runs.live_name, cell))

    return story


@pytest.fixture(scope="session")
def runs_of(sound: Sound) -> Callable[[str, str], Story]:
    """Return the sound story with the runs of a check, by the cell's id and the check's name."""

    def story(cell_id: str, check: str) -> Story:
        base = sound(cell_id)
        return replace(base, trace=more_runs.trace_of(base.cell, check))

    return story
