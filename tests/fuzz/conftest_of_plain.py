"""The conftest of generated tests under plain ``torchrun -m pytest -p no:distcompat``: it has what they use of the plugin."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Each rank records the outcomes of all tests in a directory of its own."""
    config.addinivalue_line("markers", "distcompat(world_size): run the test on ranks")
    directory = Path(os.environ["RECORDED_REPORTS"]).with_name(f"rank-{os.environ['RANK']}")
    directory.mkdir()
    os.environ["RECORDED_REPORTS"] = str(directory / "reports.jsonl")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have torchrun not end the other rank: it does so once one has failed, and a rank with a failed test counts as that."""
    session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def process_group() -> Iterator[Any]:
    """A process group of all ranks, as long as the session, by torch.distributed alone."""
    from torch import distributed

    distributed.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    yield distributed.group.WORLD
    distributed.destroy_process_group()
