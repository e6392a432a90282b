"""The surroundings of every pytest that a test runs as a process of its own."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Tests start some hundred processes, each of which would compile our modules, and pytest's rewritten ones, again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run modules that start ranks first: short tests at the end keep all workers busy until the end."""
    starts_ranks = {item.path for item in items if item.get_closest_marker("spawn")}
    items.sort(key=lambda item: item.path not in starts_ranks)


def pytest_collection_finish() -> None:
    """Take what is imported out of garbage collections: each pytest that a test runs in this process ends with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Draw the same in each run: a model made of other numbers each time meets by chance what a test says it does not."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For processes: our commands on the path, no GPU, no waiting for name servers, nothing of the outer pytest's.

    ``PYTHONPATH`` is a directory that has of this tree only what is copied there, below the same names.
    """
    copies = tmp_path_factory.mktemp("importable")
    (copies / "tests").mkdir()
    shutil.copy(HERE / "pytest_recorder.py", copies / "tests")
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    theirs.pop("GITHUB_STEP_SUMMARY", None)
    return {
        **theirs,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
        "PYTHONPATH": str(copies),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "COLUMNS": "200",
    }


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever runs these tests in the background ignores SIGINT, which processes inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
