"""A case of a suite: one check in one cell, which is one test item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import Check
from pytest_distcompat.compat_suite import CompatSuite


@dataclass(frozen=True)
class Case:
    """A case of a suite: one check in one cell, which is one test item."""

    suite: type[CompatSuite]
    cell: Cell
    check: Check
    #: The checks that have no item in this cell, each with the reason.
    not_applicable: Mapping[str, str] = field(default_factory=dict, compare=False)
    #: Why the driver cannot run the cell; None if it can.
    unsupported: str | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """The id of the item, like ``fsdp2-bf16_upcast-w2:names``."""
        return f"{self.cell.id}:{self.check.name}"
