"""Command ``distcompat``, for all that needs no test session. Does not import pytest."""

from pytest_distcompat.cli.main import main

__all__ = ["main"]
