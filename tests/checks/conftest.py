"""Gives the tests their hand-made traces."""

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
    """From a cell's id to its story, in which nothing is wrong."""

    def story(cell_id: str) -> Story:
        cell = Cell.parse(cell_id)
        return Story(cell, sound_runs.trace_of(cell), functools.partial(sound_runs.live_name, cell))

    return story


@pytest.fixture(scope="session")
def runs_of(sound: Sound) -> Callable[[str, str], Story]:
    """From a cell's id and a check's name to a story with the runs of that check, in which nothing is wrong."""

    def story(cell_id: str, check: str) -> Story:
        found = sound(cell_id)
        return replace(found, trace=more_runs.trace_of(found.cell, check))

    return story
