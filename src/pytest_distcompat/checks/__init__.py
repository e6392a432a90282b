"""Registry of checks: each is a claim, as a pure function of (cell, trace) that yields findings."""

from pytest_distcompat.checks._base import Check, check
from pytest_distcompat.registry import Registry

CHECKS: Registry[Check] = Registry(__name__, Check, "check")

__all__ = ["CHECKS", "Check", "check"]
