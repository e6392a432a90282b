"""Environment and signal handling of every pytest that a test starts as a process of its own."""

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
    """Exclude what is imported from garbage collection: each pytest that a test runs in this process ends with one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed torch before each test: with other random weights a model may by chance fulfil what a test says it does not."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment for processes that a test starts.

    It has our commands on the path, no GPU, no waiting for name servers, and nothing of the outer pytest's. ``PYTHONPATH``
    has a copy of the recorder, and nothing else of this tree.
    """
    copies = tmp_path_factory.mktemp("importable")
    (copies / "tests").mkdir()
    shutil.copy(HERE / "pytest_recorder.py", copies / "tests")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    inherited.pop("GITHUB_STEP_SUMMARY", None)
    commands = str(Path(sys.executable).parent)
    return {
        **inherited,
        "PATH": os.pathsep.join((commands, os.environ.get("PATH", ""))),
        "PYTHONPATH": str(copies),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "COLUMNS": "200",
    }


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT, for processes that inherit it: tests that run in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
