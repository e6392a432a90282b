"""The shelf of checks: each a claim, as a pure function of (cell, trace) that yields what it finds wrong."""

from pytest_distcompat.checks._base import Check, check
from pytest_distcompat.shelf import Shelf

CHECKS: Shelf[Check] = Shelf(__name__, Check, "check")

__all__ = ["CHECKS", "Check", "check"]
