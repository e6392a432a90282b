"""Registry of checks: each is a claim, as a pure function of (cell, trace) that yields findings."""

from pytest_distcompat.checks import _walk
from pytest_distcompat.checks._base import Check, check
from pytest_distcompat.registry import Registry

CHECKS: Registry[Check] = Registry(__name__, Check, "check")
#: The check of profile ``walk``, whose runs are drawn.
WALK: Check = _walk.walk

__all__ = ["CHECKS", "WALK", "Check", "check"]
