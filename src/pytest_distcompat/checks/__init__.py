"""Registry of checks: each is a claim, as a pure function of (cell, trace) that yields findings."""

import dataclasses

from pytest_distcompat.checks import _walk
from pytest_distcompat.checks._base import Check, check
from pytest_distcompat.registry import Registry

CHECKS: Registry[Check] = Registry(__name__, Check, "check")
#: The check of profile ``walk``, whose runs are drawn.
WALK: Check = _walk.walk
#: The same check of one walk, of every read-only call: what the default profile has of it.
OBSERVERS_WALK = dataclasses.replace(WALK)

__all__ = ["CHECKS", "OBSERVERS_WALK", "WALK", "Check", "all_check_names", "check", "find_check"]


def all_check_names() -> tuple[str, ...]:
    """Return the names of all checks, that of profile ``walk`` too."""
    return (*CHECKS.names(), WALK.name)


def find_check(name: str) -> Check:
    """Return the check of that name. Raises UsageProblem, with the names, if there is none."""
    return WALK if name == WALK.name else CHECKS.get(name)
