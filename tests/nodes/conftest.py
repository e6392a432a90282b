"""What runs pytest as a process of its own."""

from tests.plugin.conftest import run_pytest

__all__ = ["run_pytest"]
