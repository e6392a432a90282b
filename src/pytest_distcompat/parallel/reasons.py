"""Why a cell cannot be run: the first rule that applies.

A cell is one configuration under test, as ``fsdp2-fp32-w2-tp_2``. Drivers, strategies and the
modules of ``parallel/`` decide at collection whether a cell can run. Each has a table of rules,
(condition, reason); a reason is one sentence, which reports show for the skipped cell.
"""

from __future__ import annotations

from collections.abc import Collection

from pytest_distcompat.cell import Cell


def first_reason(*rules: tuple[bool, str]) -> str | None:
    """Return the reason of the first rule (condition, reason) whose condition holds.

    None if none does. All conditions are evaluated before the call.
    """
    for applies, reason in rules:
        if applies:
            return reason
    return None


def untried_option_reason(feature: str, cell: Cell, tried: Collection[str]) -> str | None:
    """Return the sentence that a feature was not tried together with an option of the cell.

    None if it was tried with all of them. A cell whose options were not tried together is not run.

    Args:
        feature: Its name in the sentence: "tensor parallelism".
        cell: The cell.
        tried: The names of the options with which it was tried.
    """
    for name, _ in cell.options:
        if name not in tried:
            return f"{feature} is not driven with option {name!r} yet"
    return None
