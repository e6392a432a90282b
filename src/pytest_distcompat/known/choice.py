"""Which known issues concern a driver, on the packages that are installed here.

A known issue is a bug of another project, such as accelerate, with the versions and the cells that
show it. A driver is the class by which a trainer is tested; its ``libraries`` are those that it
trains with.

``plugin`` calls ``concerning`` for a session. ``engine.check_driver`` and the commands call
``applying``, since they have no test items that an issue may name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pytest_distcompat.driver import Driver
from pytest_distcompat.expect import Expectation
from pytest_distcompat.known.issue import EVERY, KnownIssue

#: How the names of drivers begin from which the driver derives.
_SUBCLASS_OF = "subclass of "


def names_in_issues(driver: type[Driver]) -> tuple[str, ...]:
    """Return the names by which an issue may mean a driver in ``KnownIssue.drivers``.

    They are the driver's libraries and ``driver:NAME``: ``("torch", "accelerate",
    "driver:accelerate")``. A user's driver that derives from a driver of another name also has
    ``subclass of driver:NAME``.
    """
    names = [*driver.libraries, f"driver:{driver.name}"]
    for base in driver.__mro__[1:]:
        base_name = vars(base).get("name", driver.name)
        if issubclass(base, Driver) and base_name not in ("", driver.name):
            names.append(f"{_SUBCLASS_OF}driver:{base_name}")
    return tuple(names)


def concerning(
    issues: Iterable[KnownIssue], libraries: Iterable[str], device: str
) -> tuple[KnownIssue, ...]:
    """Return the issues that the installed packages have and that concern a driver.

    An issue of a driver from which this one derives is not strict: a subclass does some things
    otherwise, and need not show the bug.

    Issues that are not strict and name neither a check nor a test come last, because others are
    more specific.

    Args:
        issues: All known issues.
        libraries: The names by which an issue may mean the driver, see ``names_in_issues``.
        device: ``cpu`` or ``cuda``.
    """
    driver_names = frozenset(libraries)
    chosen = []
    for issue in issues:
        # The installed releases have the bug, and it shows on that device.
        if not issue.applies_on(device):
            continue
        if not issue.drivers or _names_driver(issue, driver_names):
            chosen.append(issue)
        elif _names_base(issue, driver_names):
            chosen.append(replace(issue, strict=False))
    return tuple(sorted(chosen, key=_is_unspecific))


def is_about_driver(issue: KnownIssue, driver: type[Driver]) -> bool:
    """Tell whether an issue names the driver, one of its libraries, or a driver it derives from."""
    driver_names = frozenset(names_in_issues(driver))
    return _names_driver(issue, driver_names) or _names_base(issue, driver_names)


def _names_driver(issue: KnownIssue, driver_names: frozenset[str]) -> bool:
    """Tell whether an issue names a driver, or one of its libraries; see ``names_in_issues``."""
    return not driver_names.isdisjoint(issue.drivers)


def _names_base(issue: KnownIssue, driver_names: frozenset[str]) -> bool:
    """Tell whether an issue names a driver from which this one derives."""
    names_of_bases = {f"{_SUBCLASS_OF}{driver}" for driver in issue.drivers}
    return not driver_names.isdisjoint(names_of_bases)


def _is_unspecific(issue: KnownIssue) -> bool:
    """Tell whether an issue may or may not show in any check and test: it names neither.

    A strict issue is specific anyway: each test that it covers must fail.
    """
    return not issue.strict and not issue.test and issue.check == (EVERY,)


def applying(
    issues: Iterable[KnownIssue], libraries: Iterable[str], device: str
) -> tuple[Expectation, ...]:
    """Return the expectations of the issues that concern a driver and name no ``test``.

    An expectation says that a check fails in some cells: ``fails("resume", strategy="fsdp1",
    match="state is empty")``. The arguments are those of ``concerning``.
    """
    expectations: list[Expectation] = []
    for issue in concerning(issues, libraries, device):
        # An issue without ``test`` matches any node id, also an empty one.
        if issue.matches_test(""):
            expectations += issue.expectations
    return tuple(expectations)
