"""Not collected here: ranks that are in the middle of something when pytest is ended, or that wait for the next test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

mark = pytest.mark.distcompat(world_size=int(os.environ.get("FAULTY_WORLD_SIZE", "2")))


@mark
def test_well(process_group: Any) -> None:
    process_group.barrier().wait()


@pytest.fixture
def fixture() -> Iterator[None]:
    yield
    Path(f"torn-down-{os.environ['RANK']}").touch()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """In pytest itself, for which this module is a plugin too: ranks that live on wait meanwhile."""
    if nodeid.endswith("test_well") and "FAULTY_IDLE" in os.environ and "RANK" not in os.environ:
        Path("idle").touch()
        time.sleep(600)


@mark
def test_busy(rank: int, process_group: Any, fixture: None) -> None:
    Path(f"busy-{rank}").touch()
    if rank == 0:
        time.sleep(600)
    process_group.barrier().wait()


@mark
def test_next(rank: int) -> None:
    pass
