"""A case of a suite: one check in one cell, which is one test item.

A suite is a subclass of ``CompatSuite``. A *cell* is a configuration of its trainer: strategy,
precision, 2 ranks and perhaps options. A *check* is a claim about it, such as ``names``: the names
of parameters map. ``suite.cases`` makes the cases at collection. A case is the parameter of its
item, whose fixture ``distcompat_case`` runs it (``suite.run``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Check
from pytest_distcompat.compat_suite import CompatSuite


@dataclass(frozen=True)
class Case:
    """One check in one cell of a suite."""

    suite: type[CompatSuite]
    cell: Cell
    check: Check
    #: The name of each check that has no item in this cell to the reason, for the report.
    not_applicable: Mapping[str, str] = field(default_factory=dict, compare=False)
    #: Why the driver cannot run the cell; None if it can.
    unsupported: str | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """The id of the item, like ``fsdp2-bf16_upcast-w2:names``."""
        return f"{self.cell.id}:{self.check.name}"
