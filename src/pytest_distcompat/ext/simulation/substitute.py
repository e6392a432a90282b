"""Which cells can be simulated, and which checks say something about them.

A *cell* is what a suite trains in: strategy, precision, number of ranks and options, as
``fsdp2-bf16-w2``. A *driver* is the trainer under test. With ``--distcompat-simulate 1024`` the
session has a ``Simulation`` in place of ranks (``plugin``). It asks it for the cells
(``fsdp2-bf16-w1024``), for the launcher, and why a cell or a check is skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.ext.simulation.launcher import SimulatingLauncher
from pytest_distcompat.ext.simulation.status import SIMULATED
from pytest_distcompat.failures import UsageProblem

#: The ids of the checks that need no values. Simulated ranks have fake tensors: shapes and dtypes
#: without values.
CHECKS = ("active", "names", "dtypes", "units", "memory")
#: The options of a cell with which FSDP2 was simulated.
_OPTIONS = frozenset(
    {
        "model",
        "dp_replicate",
        "tp",
        "sp",
        "reshard_after_forward",
        "activation_checkpointing",
        "state_dict",
        "frozen",
        "param_groups",
        "reduce_dtype",
        "float32_norms",
        "ema",
    }
)


class Simulation:
    """Simulated ranks in the place of all ranks of suites.

    It has the attributes and methods of the protocol ``pytest_distcompat.substitute.Substitute``,
    by which the session uses it: ``title`` is its line in pytest's header, ``needs_ranks`` why a
    marked test is skipped.
    """

    name = "simulation"
    option = "--distcompat-simulate"
    needs_ranks = "simulated: a marked test needs ranks"

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.title = (
            f"simulated: {world_size} ranks, of which those that differ are simulated; "
            "no values are computed"
        )

    def launcher(self) -> SimulatingLauncher:
        """Return the launcher of simulations."""
        return SimulatingLauncher()

    def cells(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells with the number of ranks to simulate, each once.

        Raises:
            UsageProblem: So many ranks cannot form the mesh that a cell's options ask for.
        """
        try:
            resized = [dataclasses.replace(cell, world_size=self.world_size) for cell in cells]
        except ValueError as error:
            size = f"{self.option} {self.world_size}"
            raise UsageProblem(f"{size}: {error}") from None
        return list(dict.fromkeys(resized))

    def why_not_supported(self, driver: type[Driver], cell: Cell) -> str | None:
        """Return why a cell cannot be simulated; None if it can."""
        if cell.strategy != "fsdp2":
            return (
                f"{cell.strategy} needs values and peers; "
                "FSDP2, with replicas and tensor parallelism, can be simulated"
            )
        # The driver declares the libraries that it trains with: ``("accelerate", "torch")``.
        if {*driver.libraries} - {"torch"}:
            libraries = " and ".join(driver.libraries)
            return f"{libraries} reads values at build; drivers of plain torch can be simulated"
        for name, _ in cell.options:
            if name not in _OPTIONS:
                return f"option {name!r} needs values, or was not simulated yet"
        return None

    def why_not_checked(self, check: str) -> str | None:
        """Return why a check is not made, that it needs values; None if it needs none."""
        if check in CHECKS:
            return None
        return SIMULATED.reason
