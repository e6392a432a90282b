"""The registry of checks: each a claim, as a pure function of (cell, trace) that yields what it finds wrong."""

from pytest_distcompat.checks._base import Check, check
from pytest_distcompat.registry import Registry

CHECKS: Registry[Check] = Registry(__name__, Check, "check")

__all__ = ["CHECKS", "Check", "check"]
