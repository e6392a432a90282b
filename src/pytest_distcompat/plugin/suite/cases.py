"""Which cases a suite has in this session: its cells, by profile and options, with their checks.

A *suite* is a subclass of ``CompatSuite`` with a *driver* (the trainer under test) and a *matrix*
(strategies, precisions, world sizes, options). The matrix stands for many *cells*, such as
``fsdp2-fp32-w2``. Each cell has several *checks*, claims such as ``names``. A *case* is one check
in one cell, and becomes one pytest item: ``TestMyTrainer::test[fsdp2-fp32-w2:names]``.

The hook ``pytest_generate_tests`` calls ``parametrize`` for each suite. Four things decide about
the cases: the *profile* (``--distcompat-profile smoke`` runs each strategy once), options that
select strategies, precisions or drivers, what driver and machine can run, and which checks are
*applicable* in a cell, that is, have something to say there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from pytest_distcompat import profiles
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.compat_suite import CompatSuite
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver, preload_of
from pytest_distcompat.plugin.session import LEFT_OUT, DistcompatSession
from pytest_distcompat.plugin.suite.case import Case
from pytest_distcompat.plugin.suite.suite_class import all_cells
from pytest_distcompat.plugin.suite.why_not import why_not_checked, why_not_supported
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES


def cases(suite: type[CompatSuite], session: DistcompatSession) -> list[Case]:
    """Return the cases of a suite in this session: the selected cells with their checks.

    A cell that cannot run is one case, whose skip gives the reason.
    """
    drivers = session.setting("drivers").value
    if drivers and suite.driver not in drivers:
        return []
    driver = find_driver(suite.driver)
    profile = session.setting("profile").value
    check = _only_check(profile, session)
    cells = _selected_cells(suite, driver, session, any_precision=check is not None)
    if check is not None:
        # An extension's profile with one check has that one in each of its cells.
        only_cases = []
        for cell in cells:
            reason = why_not_supported(driver, cell, session)
            only_cases.append(Case(suite, cell, check, unsupported=reason))
        return only_cases
    # Cell to the reason why it cannot run, None if it can; and cell to the checks without a verdict
    # in it, each with the reason.
    unsupported = {cell: why_not_supported(driver, cell, session) for cell in cells}
    not_applicable = {cell: _checks_without_verdict(cell, driver, session) for cell in cells}
    _leave_out(profile, not_applicable, unsupported)
    selected: list[Case] = []
    for cell, reasons in not_applicable.items():
        for check in CHECKS.by_name.values():
            if check.name not in reasons:
                case = Case(
                    suite, cell, check, not_applicable=reasons, unsupported=unsupported[cell]
                )
                selected.append(case)
                # One skipped item is enough for a cell that cannot run.
                if unsupported[cell]:
                    break
    selected += _added_cases(suite, driver, session)
    return selected


def _only_check(profile: str, session: DistcompatSession) -> Check | None:
    """Return the only check that an extension's profile runs; None if the profile runs all.

    A session with a substitute for ranks, as an extension may have, runs all in any case.
    """
    if session.substitute is not None:
        return None
    added_profile = profiles.find_added(profile)
    return None if added_profile is None else added_profile.check


def _is_built_in(suite: type[CompatSuite]) -> bool:
    """Tell whether a suite comes with this package."""
    return suite.__module__.startswith("pytest_distcompat.")


def _selected_cells(
    suite: type[CompatSuite],
    driver: type[Driver],
    session: DistcompatSession,
    *,
    any_precision: bool,
) -> list[Cell]:
    """Return the cells that the profile derives from the suite's matrix and options select.

    Args:
        suite: The suite.
        driver: Its driver.
        session: The session, with the options.
        any_precision: Whether to ignore options that select precisions.
    """
    profile = session.setting("profile").value
    # The matrix with the number of machines that the session has.
    matrix = session.placement.spread_matrix(suite.matrix)
    names = (STRATEGIES.names(), PRECISIONS.names())
    cells = profiles.cells(
        profile,
        matrix,
        driver=driver,
        names=names,
        world_size=session.world_size,
        device=session.device,
        shared=lambda: session.store,
    )
    if session.substitute is not None:
        cells = session.substitute.cells(cells)
    elif not _is_built_in(suite):
        own_cells = matrix.cells(*names, session.world_size)
        _count_left_out(suite, driver, own_cells, cells, session)
    selected = []
    for cell in cells:
        if session.selects(cell, any_precision=any_precision):
            selected.append(cell)
    return selected


def _count_left_out(
    suite: type[CompatSuite],
    driver: type[Driver],
    own: Iterable[Cell],
    chosen: Collection[Cell],
    session: DistcompatSession,
) -> None:
    """Add a line to the summary if the profile leaves out cells of the suite's matrix.

    Args:
        suite: The suite, one of the user's.
        driver: Its driver.
        own: The cells of the suite's matrix.
        chosen: The cells of the profile.
        session: The session.
    """
    # The cells that could run with another profile.
    able = []
    for cell in own:
        if session.selects(cell) and not why_not_supported(driver, cell, session):
            able.append(cell)
    left_out = len(set(able) - set(chosen))
    if left_out:
        name = session.setting("profile").value
        cells_text = f"{len(able)} cells of {suite.__name__}'s matrix that can run here"
        line = (
            f"profile {name} leaves out {left_out} of the {cells_text} "
            "(--distcompat-profile default runs them)"
        )
        session.left_out[suite.__module__, suite.__qualname__] = line
        # For the process that has the terminal.
        session.share(LEFT_OUT, [*session.left_out.values()])


def _checks_without_verdict(
    cell: Cell, driver: type[Driver], session: DistcompatSession
) -> dict[str, str]:
    """Return the checks without a verdict in a cell: name to reason."""
    reasons = {}
    for name, check in CHECKS.by_name.items():
        reason = why_not_checked(check, cell, driver, session)
        if reason:
            reasons[name] = reason
    return reasons


def _leave_out(
    profile: str,
    not_applicable: Mapping[Cell, dict[str, str]],
    unsupported: Mapping[Cell, str | None],
) -> None:
    """Add the checks that the profile leaves out to ``not_applicable``, each with the reason.

    A profile may run a check in one cell only, if it would say the same in others.

    Args:
        profile: The name of the profile.
        not_applicable: Cell to the checks without a verdict; it is changed in place.
        unsupported: Cell to the reason why it cannot run; None if it can.
    """
    applicable = {}
    for cell, reasons in not_applicable.items():
        if not unsupported[cell]:
            applicable[cell] = [name for name in CHECKS.names() if name not in reasons]
    left_out = profiles.left_out(profile, applicable, CHECKS.by_name)
    for (cell, check), reason in left_out.items():
        not_applicable[cell][check] = reason


def _added_cases(
    suite: type[CompatSuite], driver: type[Driver], session: DistcompatSession
) -> list[Case]:
    """Return the cases that extensions add, in cells that the options select."""
    added_cases = []
    for by_extension in session.config.hook.pytest_distcompat_added_checks(
        suite=suite, session=session
    ):
        for added in by_extension:
            if session.selects(added.cell):
                unsupported = why_not_supported(driver, added.cell, session)
                added_cases.append(Case(suite, added.cell, added.check, unsupported=unsupported))
    return added_cases


@dataclass(frozen=True)
class NoCell:
    """The parameter of the only item of a suite without cells, which is skipped with the reason."""

    #: The id of the parameter.
    id: ClassVar[str] = "no-cell"

    reason: str


#: How many reasons a message gives why no cell of a suite can run.
REASONS = 2


def why_no_cell(suite: type[CompatSuite], session: DistcompatSession) -> str:
    """Return why no cell of the suite is selected, or why none of the selected cells can run.

    The text is the reason with which the suite's only item is skipped.
    """
    drivers = session.setting("drivers")
    if drivers.value and suite.driver not in drivers.value:
        return f"--distcompat-drivers={drivers.text} leaves out driver {suite.driver!r}"
    cells = list(all_cells(suite, session.world_size))
    selected = []
    for cell in cells:
        if session.selects(cell):
            selected.append(cell)
    if not selected:
        reasons = "; ".join(_excluding_options(cells, session))
        return f"no cell of {suite.__name__} is selected: {reasons or 'its matrix is empty'}"
    driver = find_driver(suite.driver)
    reasons = "; ".join(_commonest_reasons(selected, driver, session))
    return f"no cell of {suite.__name__} can run here: {reasons or 'the profile has none for it'}"


def _excluding_options(cells: Iterable[Cell], session: DistcompatSession) -> list[str]:
    """Return the options that exclude the cells: ``strategies 'zero3' of ddp, fsdp2``."""
    strategies: dict[str, None] = {}
    precisions: dict[str, None] = {}
    for cell in cells:
        strategies[cell.strategy] = None
        precisions[cell.precision] = None
    reasons = []
    for name, names_of_cells in (("strategies", strategies), ("precisions", precisions)):
        setting = session.setting(name)
        if setting.value:
            of_cells = ", ".join(names_of_cells) or "none"
            reasons.append(f"{name} {setting.text!r} of {of_cells}")
    return reasons


def _commonest_reasons(
    cells: Iterable[Cell], driver: type[Driver], session: DistcompatSession
) -> list[str]:
    """Return the most frequent reasons why cells cannot run here.

    A missing package comes before all other reasons, because the user can install it.
    """
    times: Counter[str] = Counter()
    for cell in cells:
        reason = why_not_supported(driver, cell, session)
        if reason:
            times[reason] += 1

    def missing_package_first(reason: str) -> tuple[bool, int]:
        return "not installed" not in reason, -times[reason]

    ordered = sorted(times, key=missing_package_first)
    return ordered[:REASONS]


def parametrize(metafunc: pytest.Metafunc, session: DistcompatSession) -> None:
    """Run a suite's test once for each of its cases.

    A suite without cases has one item, ``NoCell``, so that it does not vanish silently.

    Raises:
        UsageProblem: An option or the suite names something that does not exist.
    """
    suite: Any = metafunc.cls
    selected = cases(suite, session)
    parameters: Sequence[Case | NoCell] = selected
    if selected:
        cells = [case.cell for case in selected]
        # The fork server imports what the drivers need, so that ranks need not.
        session.modules += preload_of(find_driver(suite.driver), cells)
    else:
        parameters = [NoCell(why_no_cell(suite, session))]
    ids = [parameter.id for parameter in parameters]
    metafunc.parametrize("distcompat_case", parameters, ids=ids, indirect=True)
