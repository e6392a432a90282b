"""Tied parameters that FSDP2 shards as if they were two."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import module_of
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ModelInfo, RunTrace


def tied_apart(cell: Cell, run: RunTrace) -> str:
    """Return, for the end of a finding, which tied names FSDP2 shards as two parameters.

    These names are in units of their own; an empty text if there are none.

    Each unit gathers and frees its own copy of what is one parameter:
    https://github.com/pytorch/pytorch/issues/176076.
    """
    group = _group_apart(cell, run)
    if not group:
        return ""
    names = " and ".join(repr(name) for name in group)
    return (
        f"; {names} are one tensor in units of their own: "
        "shard them as one, fully_shard([...]), or leave both to the root"
    )


def _group_apart(cell: Cell, run: RunTrace) -> Sequence[str]:
    """Return the first names of one tensor whose modules are all units of FSDP2.

    Empty if there are none.
    """
    model = _first_model(run)
    if model is None or run.unwrapped is None:
        return ()
    if "FSDP2" not in model.wrappers:
        return ()
    tied_modules: set[str] = set()
    for group in run.unwrapped.tied:
        tied_modules |= _owners(group)
    strategy = STRATEGIES.get(cell.strategy)
    units: set[str] = set()
    for unit in model.units:
        units.add(strategy.canonical(unit, cell, tied_modules))
    for group in run.unwrapped.tied:
        owners = _owners(group)
        if len(owners) > 1 and owners <= units:
            return group
    return ()


def _first_model(run: RunTrace) -> ModelInfo | None:
    """Return the model of the lowest rank that reported one after build."""
    for snapshot in run.at("build"):
        if snapshot.model:
            return snapshot.model
    return None


def _owners(names: Sequence[str]) -> set[str]:
    """Return the names of the modules that have the parameters of these names."""
    return {module_of(name) for name in names}
