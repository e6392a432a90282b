"""Gives the tests their hand-made traces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.checks import more_lives, sound_lives
from tests.checks.traces import Sound, Story

from pytest_distcompat.cell import Cell


@pytest.fixture(scope="session")
def sound() -> Sound:
    """From a cell's id to its story, in which nothing is wrong."""

    def story(cell_id: str) -> Story:
        cell = Cell.parse(cell_id)
        return Story(cell, sound_lives.trace_of(cell), functools.partial(sound_lives.live_name, cell))

    return story


@pytest.fixture(scope="session")
def lives_of(sound: Sound) -> Callable[[str, str], Story]:
    """From a cell's id and a check's name to a story with the lives of that check, in which nothing is wrong."""

    def story(cell_id: str, check: str) -> Story:
        found = sound(cell_id)
        return replace(found, trace=more_lives.trace_of(found.cell, check))

    return story
