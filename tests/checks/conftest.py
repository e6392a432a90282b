"""Gives the tests their hand-made traces."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.checks.traces import Sound


@pytest.fixture(scope="session")
def sound() -> Sound:
    """From a cell's id to its story, in which nothing is wrong.

    Loaded by its path: with --import-mode=importlib no test folder is on sys.path.
    """
    spec = importlib.util.spec_from_file_location("distcompat_test_traces", Path(__file__).with_name("traces.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks a class's module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    story: Sound = module.Story.sound
    return story
