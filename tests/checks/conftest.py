"""Gives the tests their hand-made traces."""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tests.checks.traces import Sound, Story


@pytest.fixture(scope="session")
def sound() -> Sound:
    """From a cell's id to its story, in which nothing is wrong."""
    traces, lives = _load("traces"), _load("sound_lives")

    def story(cell_id: str) -> Story:
        cell = Cell.parse(cell_id)
        found: Story = traces.Story(cell, lives.trace_of(cell), functools.partial(lives.live_name, cell))
        return found

    return story


@pytest.fixture(scope="session")
def lives_of(sound: Sound) -> Callable[[str, str], Story]:
    """From a cell's id and a check's name to a story with the lives of that check, in which nothing is wrong."""
    module = _load("more_lives")

    def story(cell_id: str, check: str) -> Story:
        found = sound(cell_id)
        return replace(found, trace=module.trace_of(found.cell, check))

    return story


def _load(name: str) -> ModuleType:
    """By its path: with --import-mode=importlib no test folder is on sys.path."""
    spec = importlib.util.spec_from_file_location(f"distcompat_test_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks a class's module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
