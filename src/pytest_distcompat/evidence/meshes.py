"""Meshes: which rank holds which part of which parameter, as the page of a report draws it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.excerpt import name_patterns
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FLAT, MeshDim, ParameterInfo, RunTrace, held_indices

#: A placement that cuts one dimension of the tensor: its number, and into how many pieces it was cut before.
_SHARD = re.compile(r"(?:Strided)?Shard\((-?\d+)(?:, (\d+))?\)")


def mesh(cell: Cell, run: RunTrace) -> dict[str, Any] | None:
    """Return the ranks at their coordinates, and the parts that they hold after ``build``, once for each distinct layout.

    Args:
        cell: The cell of the training.
        run: The training.

    Returns:
        Plain data as the schema describes it; None for a mesh of one dimension without tensor or pipeline parallelism.
    """
    snapshots, unwrapped = run.at("build"), run.unwrapped
    known = {info.name for info in unwrapped.parameters} | {*unwrapped.state_dict} if unwrapped else set()
    strategy = STRATEGIES.get(cell.strategy)
    held = [
        {strategy.canonical(info.name, cell, known): info for info in snapshot.parameters} for snapshot in snapshots
    ]
    widest = max((_dims(info) for one in held for info in one.values()), key=len, default=())
    if not held or (len(widest) < 2 and cell.tp * cell.pp == 1):
        return None
    dims = [{"name": dim.name, "size": dim.size} for dim in widest]
    at = [_coordinate(list(one.values()), widest) for one in held]
    if {*map(len, at)} != {len(dims)} or len({*map(tuple, at)}) < len(held):
        # Parameters lie on no mesh that tells the ranks apart.
        dims, at = [{"name": "rank", "size": run.world_size}], [[snapshot.rank] for snapshot in snapshots]
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, info in {name: info for one in reversed(held) for name, info in one.items()}.items():
        parts = tuple(_part(one[name].shape, one[name].layout.dims) if name in one else "none" for one in held)
        alike.setdefault((info.shape, str(info.layout), parts), []).append(name)
    layouts = [
        {"names": name_patterns(names), "shape": list(shape), "placement": placement, "parts": list(parts)}
        for (shape, placement, parts), names in alike.items()
    ]
    ranks = [{"rank": one.rank, "at": place} for one, place in zip(snapshots, at, strict=True)]
    return {"dims": dims, "ranks": ranks, "layouts": layouts}


def _dims(info: ParameterInfo) -> tuple[MeshDim, ...]:
    return tuple(dim for dim in info.layout.dims if dim.size > 1)


def _coordinate(parameters: Sequence[ParameterInfo], dims: Sequence[MeshDim]) -> list[int]:
    """Return the rank's place on these dimensions, as far as its parameters tell it."""
    # Experts and all else are on meshes of their own, with dimensions of one name and two sizes.
    found = {(dim.name, dim.size): dim.coordinate for info in parameters for dim in _dims(info)}
    return [found[dim.name, dim.size] for dim in dims if (dim.name, dim.size) in found]


@functools.lru_cache(maxsize=1024)
def _part(shape: tuple[int, ...], dims: tuple[MeshDim, ...]) -> str:
    """Return the held part as slices, ``0:8, :``; ``all`` of the tensor, or ``none``."""
    placed = ((dim, _SHARD.fullmatch(dim.placement)) for dim in dims)
    held = held_indices(
        shape, ((int(cut[1]), int(cut[2] or 1), dim.size, dim.coordinate) for dim, cut in placed if cut)
    )
    flat = [f"flat piece {dim.coordinate + 1} of {dim.size}" for dim in dims if dim.placement == FLAT]
    if not all(map(len, held)):
        return "none"
    slices = [_slices(rows, size) for rows, size in zip(held, shape, strict=True)]
    return "; ".join([*([", ".join(slices)] if {*slices} - {":"} else []), *flat]) or "all"


def _slices(rows: Sequence[int], size: int) -> str:
    """Return ascending numbers as slices: ``0:4``, ``0:4 + 8:12``; a colon for all of them."""
    if len(rows) == size:
        return ":"
    starts = [row for row, before in zip(rows, [-2, *rows], strict=False) if row != before + 1]
    ends = [row + 1 for row, after in zip(rows, [*rows[1:], -2], strict=True) if row + 1 != after]
    return " + ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))
