"""What runs pytest as a process of its own, and the trainer that its suites have."""

import shutil
from pathlib import Path

import pytest
from tests.plugin.conftest import run_pytest

__all__ = ["run_pytest"]


@pytest.fixture(scope="session")
def environment(environment: dict[str, str]) -> dict[str, str]:
    """With what the suites import."""
    importable = Path(environment["PYTHONPATH"], "tests", "plugin")
    importable.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parents[1] / "plugin" / "adopter.py", importable)
    return environment
