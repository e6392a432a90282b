"""Registry of checks: each is a claim, as a pure function of (cell, trace) that yields findings."""

import dataclasses

from pytest_distcompat.checks import _walk
from pytest_distcompat.checks._base import REDUCTIONS, Check, and_others, check, message, named_ranks, pairs
from pytest_distcompat.registry import Registry

CHECKS: Registry[Check] = Registry(__name__, Check, "check")
#: The check of profile ``walk``: its runs are sequences of calls that are drawn at random.
WALK: Check = _walk.walk
#: The same check for the default profile, in which its only walk makes every read-only call.
OBSERVERS_WALK = dataclasses.replace(WALK)

__all__ = [
    "CHECKS",
    "OBSERVERS_WALK",
    "REDUCTIONS",
    "WALK",
    "Check",
    "all_check_names",
    "and_others",
    "check",
    "find_check",
    "message",
    "named_ranks",
    "pairs",
]


def all_check_names() -> tuple[str, ...]:
    """Return the names of all checks, including that of profile ``walk``."""
    return (*CHECKS.names(), WALK.name)


def find_check(name: str) -> Check:
    """Return the check of that name.

    Raises:
        UsageProblem: If there is none; the message lists the names.
    """
    if name == WALK.name:
        return WALK
    return CHECKS.get(name)
