"""The command ``distcompat``: what can be done without a test run. Imports no pytest."""

from pytest_distcompat.cli.main import main

__all__ = ["main"]
