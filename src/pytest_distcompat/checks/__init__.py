"""The registry of checks.

A check is a claim, as a pure function of a cell (one point of the test matrix, such as
``fsdp2-bf16_upcast-w2``) and a trace (what the ranks of its runs recorded). It yields findings, a
sentence for each thing that is wrong. The modules of this package without an underscore define
checks; other packages add some by entry points. ``_base`` says how a check is used.

The names in ``__all__`` are for extensions and other packages.
"""

from pytest_distcompat.checks._base import Check, Execution, check, message, pairs
from pytest_distcompat.checks._reductions import REDUCTIONS
from pytest_distcompat.checks._reference import tolerances
from pytest_distcompat.model_values import Names
from pytest_distcompat.model_values import values as held_values
from pytest_distcompat.registry import Registry
from pytest_distcompat.wording import and_others, named_ranks

#: All checks of this package, and those that other packages add: ``CHECKS.get("resume")``.
CHECKS: Registry[Check] = Registry(__name__, Check, "check")
#: Checks of extensions that run only in cells that the extension adds. Other cells do not have
#: them.
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
    """Return the check of that name, also one of an extension for its own cells.

    Raises:
        UsageProblem: If there is none; the message lists the names.
    """
    if name not in CHECKS.by_name and name in ADDED_CHECKS.by_name:
        return ADDED_CHECKS.get(name)
    return CHECKS.get(name)
