"""A hint about tied parameters that FSDP2 shards as if they were two.

Tied parameters are one tensor with two names, such as embedding and output layer. A unit of FSDP2
is a module that was wrapped by a ``fully_shard`` of its own. If both owners of a tied tensor are
units, each unit gathers and frees a copy of its own, and training goes wrong.

The checks ``resume``, ``parity``, ``clipping`` and ``gradients`` call ``tied_apart``, and append
its text to their findings, because it may be the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import module_of
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ModelInfo, RunTrace


def tied_apart(cell: Cell, run: RunTrace) -> str:
    """Return the hint for the end of a finding; empty if no tied parameter is sharded as two.

    The upstream issue is https://github.com/pytorch/pytorch/issues/176076.
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
    """Return the names of the first tied tensor whose owners are all units of FSDP2.

    An example is ``("model.embed_tokens.weight", "lm_head.weight")``. The result is empty if there
    is no such tensor.
    """
    model = _first_model(run)
    if model is None or run.unwrapped is None:
        return ()
    # ``wrappers`` has each kind of wrapper with the number of its modules: ``{"FSDP2": 3}``.
    if "FSDP2" not in model.wrappers:
        return ()
    tied_modules: set[str] = set()
    for group in run.unwrapped.tied:
        tied_modules |= _owners(group)
    strategy = STRATEGIES.get(cell.strategy)
    # The names that the units have in the unwrapped model.
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
