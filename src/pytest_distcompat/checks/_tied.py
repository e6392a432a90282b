"""Tied parameters that FSDP2 shards as if they were two."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import module_of
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ModelInfo, RunTrace


def tied_apart(cell: Cell, run: RunTrace) -> str:
    """Return, for the end of a finding, which tied names FSDP2 has in units of their own.

    The text is empty if there are none. Each unit gathers and frees its own copy of what is one
    parameter: https://github.com/pytorch/pytorch/issues/176076.
    """
    group = _group_apart(cell, run)
    if not group:
        return ""
    names = " and ".join(repr(name) for name in group)
    cause = f"{names} are one tensor in units of their own"
    return f"; {cause}: shard them as one, fully_shard([...]), or leave both to the root"


def _group_apart(cell: Cell, run: RunTrace) -> Sequence[str]:
    """Return the names of the first tensor that several modules have, each a unit of FSDP2.

    There are no names if there is no such tensor.
    """
    model = _built_model(run)
    if model is None or run.unwrapped is None or "FSDP2" not in model.wrappers:
        return ()
    tied_modules: set[str] = set()
    for group in run.unwrapped.tied:
        tied_modules.update(_owners(group))
    strategy = STRATEGIES.get(cell.strategy)
    units = {strategy.canonical(unit, cell, tied_modules) for unit in model.units}
    for group in run.unwrapped.tied:
        owners = _owners(group)
        if len(owners) > 1 and owners <= units:
            return group
    return ()


def _built_model(run: RunTrace) -> ModelInfo | None:
    """Return the model of the first rank that built one."""
    for snapshot in run.at("build"):
        if snapshot.model:
            return snapshot.model
    return None


def _owners(group: Sequence[str]) -> set[str]:
    """Return the modules that have a tied tensor."""
    return {module_of(name) for name in group}
