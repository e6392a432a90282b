"""Why a case, a cell or a check of a suite has no verdict here.

A *suite* tests a *driver*, a trainer. It has *cells*, configurations such as ``fsdp2-fp32-w2``
(strategy, precision, 2 ranks), and *checks*, claims about a cell. A *case* is a check in a cell,
one pytest item. There are three functions, because the reason decides what pytest shows:

- ``why_not_supported``: the cell cannot run. The suite has one item for it, which is skipped.
- ``why_not_checked``: the check has no verdict in the cell. The suite has no item for it.
- ``why_not_run``: called before a case runs, and adds that this machine has too few GPUs.

The session brings two reasons of its own. It may have a *substitute* for ranks: an extension that
answers in their place without starting any; it says what it cannot answer. And several ranks may
*share* one GPU, by torch's backend gloo where NCCL takes only one of them (``shared_gpu``): some
cells cannot run that way, and in others some checks cannot judge.
"""

from __future__ import annotations

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Check
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver, unsupported_reason
from pytest_distcompat.engine import not_applicable
from pytest_distcompat.plugin.session import DistcompatSession
from pytest_distcompat.plugin.suite.case import Case
from pytest_distcompat.plugin.suite.shared_gpu import why_not_through_gloo
from pytest_distcompat.strategies import STRATEGIES

#: Why no cell with DeepSpeed can run on a MIG instance, a part of a GPU. The file
#: docs/upstream/deepspeed_visible_uuid.py reproduces it.
NO_MIG = (
    "DeepSpeed reads CUDA_VISIBLE_DEVICES as numbers, and a MIG instance has none: "
    "it is named by its UUID"
)


def why_not_run(case: Case, session: DistcompatSession) -> str | None:
    """Return why the driver or the machine cannot run the case; None if they can.

    A case needs several runs (process groups from start to end), some of which may have more ranks
    than the cell itself.
    """
    if case.unsupported:
        return case.unsupported
    driver = find_driver(case.suite.driver)
    # The most ranks on one machine. All machines are assumed to have as many GPUs as this one.
    largest = 0
    for run in case.check.runs(case.cell, driver).runs:
        cell = run.cell(case.cell)
        largest = max(largest, cell.spread.local_size)
    # ``too_large`` returns the reason, empty if there are GPUs enough.
    return session.too_large(largest) or None


def why_not_supported(driver: type[Driver], cell: Cell, session: DistcompatSession) -> str | None:
    """Return why the driver or this session cannot run the cell; None if they can."""
    if session.uses_mig and STRATEGIES.get(cell.strategy).zero_stage is not None:
        return NO_MIG
    # ``uneven`` is the reason why the ranks cannot be spread evenly over machines, if they cannot.
    reason = cell.spread.uneven or unsupported_reason(driver, cell, session.device)
    if not reason and session.substitute is not None:
        reason = session.substitute.why_not_supported(driver, cell)
    if not reason and session.shares_through_gloo(cell.world_size):
        reason = why_not_through_gloo(cell)
    return reason or None


def why_not_checked(
    check: Check, cell: Cell, driver: type[Driver], session: DistcompatSession
) -> str | None:
    """Return why a check has no verdict in a cell; None if it has one."""
    if session.substitute is not None:
        reason = session.substitute.why_not_checked(check.name)
        if reason:
            return reason
    # A reason against the whole cell gives one skipped item, rather than one for each check.
    if session.shares_through_gloo(cell.world_size) and not why_not_through_gloo(cell):
        reason = why_not_through_gloo(cell, check.name)
        if reason:
            return reason
    return not_applicable(check, cell, driver, session.limits)
