"""Registry of checks: each is a claim, as a pure function of (cell, trace) that yields findings."""

from pytest_distcompat.checks._base import Check, Execution, check, message, pairs
from pytest_distcompat.checks._reductions import REDUCTIONS
from pytest_distcompat.checks._reference import tolerances
from pytest_distcompat.model_values import Names
from pytest_distcompat.model_values import values as held_values
from pytest_distcompat.registry import Registry
from pytest_distcompat.wording import and_others, named_ranks

CHECKS: Registry[Check] = Registry(__name__, Check, "check")
#: Checks of extensions that run only in the cells that the extension adds.
ADDED_CHECKS: Registry[Check] = Registry(
    "pytest_distcompat.added_checks", Check, "check", has_modules=False
)

__all__ = [
    "ADDED_CHECKS",
    "CHECKS",
    "REDUCTIONS",
    "Check",
    "Execution",
    "Names",
    "all_check_names",
    "and_others",
    "check",
    "find_check",
    "held_values",
    "message",
    "named_ranks",
    "pairs",
    "tolerances",
]


def all_check_names() -> tuple[str, ...]:
    """Return the names of all checks, including those that extensions add cells for."""
    return (*CHECKS.names(), *ADDED_CHECKS.names())


def find_check(name: str) -> Check:
    """Return the check of that name.

    Raises:
        UsageProblem: If there is none; the message lists the names.
    """
    if name not in CHECKS.by_name and name in ADDED_CHECKS.by_name:
        return ADDED_CHECKS.get(name)
    return CHECKS.get(name)
