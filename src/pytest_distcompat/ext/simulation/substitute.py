"""Which cells can be simulated, and which checks say something about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.ext.simulation.launcher import SimulatingLauncher
from pytest_distcompat.ext.simulation.status import SIMULATED
from pytest_distcompat.failures import UsageProblem

#: The checks that need no values.
CHECKS = ("active", "names", "dtypes", "units", "memory")
#: The options beside which FSDP2 was simulated.
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
    }
    | {"param_groups", "reduce_dtype", "float32_norms"}
)


class Simulation:
    """Simulated ranks in the place of all ranks of suites (``substitute.Substitute``)."""

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
        """Return the cells for so many ranks, each once.

        Raises:
            UsageProblem: So many ranks cannot form the mesh of a cell.
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
        if {*driver.libraries} - {"torch"}:
            libraries = " and ".join(driver.libraries)
            return f"{libraries} reads values at build; drivers of plain torch can be simulated"
        for name, _ in cell.options:
            if name not in _OPTIONS:
                return f"option {name!r} needs values, or was not simulated yet"
        return None

    def why_not_checked(self, check: str) -> str | None:
        """Return that a check needs values; None if it needs none."""
        if check in CHECKS:
            return None
        return SIMULATED.reason
