"""Why a check about checkpoints leaves a cell to another cell.

A cell is one point of the test matrix, such as ``fsdp2-bf16_upcast-w2-compile``. Checks that load a
checkpoint at another world size, or a damaged one, need several expensive runs. Most options of a
cell do not matter for them, so only cells without these options have such a check.

Each function is a part of a check's ``not_applicable``. It returns the reason, which the report
shows, or None if the claim is tested in this cell.
"""

from __future__ import annotations

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import CHECKPOINT_OPTIONS
from pytest_distcompat.driver import Driver
from pytest_distcompat.law import law_of


def options_beside_checkpoints(cell: Cell) -> list[str]:
    """Return the names of the cell's options, without some that matter only for checkpoints.

    Which options matter only for them says the cell's law (``law.Law``): an extension may have one
    of its own, and settings that only a save or a load reads.
    """
    read_at_checkpoints = law_of(cell).read_at_checkpoints(cell)
    return [name for name, _ in cell.options if name not in read_at_checkpoints]


def only_where_it_differs(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why a claim about which files are found is tested in another cell; None if it is not.

    The check ``damage`` makes it: a load must notice that a file is missing or cut. Precisions and
    most options do not matter for it.
    """
    others = []
    for name in options_beside_checkpoints(cell):
        if name not in {"model", "state_dict"}:
            others.append(name)
    if cell.precision != "fp32" or others:
        return "files are found as they are in fp32 without that option, and it is tested there"
    return None


def saved_as_elsewhere(cell: Cell) -> str | None:
    """Return why a claim about saved tensors is tested in another cell; None if it is not."""
    # Each such cell would need runs at other world sizes, which are the most expensive ones.
    for name in options_beside_checkpoints(cell):
        # These options change what a checkpoint holds, or how: ``lora``, ``state_dict``, ...
        if name not in CHECKPOINT_OPTIONS:
            changes = f"{name} changes how the model is trained, not what is saved"
            return f"{changes}, and what is saved is tested without it"
    if cell.precision not in {"fp32", "bf16_upcast"}:
        return (
            f"a checkpoint in {cell.precision} is combined like those in fp32 and bf16_upcast, "
            "where it is tested"
        )
    return None
