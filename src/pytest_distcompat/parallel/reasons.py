"""Why a cell cannot be run: the first rule that applies."""

from __future__ import annotations

from collections.abc import Collection

from pytest_distcompat.cell import Cell


def first_reason(*rules: tuple[bool, str]) -> str | None:
    """Return the reason of the first rule (condition, reason) whose condition holds.

    None if none does.
    """
    for applies, reason in rules:
        if applies:
            return reason
    return None


def untried_option_reason(feature: str, cell: Cell, tried: Collection[str]) -> str | None:
    """Return that a feature was not tried together with an option of the cell.

    None if it was tried with all of them.
    """
    for name, _ in cell.options:
        if name not in tried:
            return f"{feature} is not driven with option {name!r} yet"
    return None
