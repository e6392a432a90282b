"""Which rank holds which part of which parameter, as the HTML page of a report draws it.

torch arranges ranks in a *mesh*, a grid with a dimension for each parallelism: four ranks as
``dp_shard`` of size 2 times ``tp`` of size 2. The *layout* of a parameter says how it is placed
along each dimension: ``dp_shard=Shard(0), tp=Replicate``.

``evidence.cells`` calls ``mesh`` for the training of a cell. It returns plain data:

    {
        "dims": [{"name": "dp_shard", "size": 2}, {"name": "tp", "size": 2}],
        "ranks": [{"rank": 0, "at": [0, 0]}, {"rank": 1, "at": [0, 1]}, ...],
        "layouts": [{"names": ["lm_head.weight"], "shape": [8, 4], "placement": "...",
                     "parts": ["0:4, :", "0:4, :", "4:8, :", "4:8, :"]}, ...],
    }

``parts`` has what each rank holds, in rank order: slices, ``all`` or ``none``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.excerpt import name_patterns
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FLAT, MeshDim, ParameterInfo, RunTrace, held_indices

#: A placement that shards a dimension of the tensor. ``Shard(0)`` shards dimension 0.
#: ``StridedShard(0, 2)`` shards each of the 2 pieces that another mesh dimension has made.
_SHARD = re.compile(r"(?:Strided)?Shard\((-?\d+)(?:, (\d+))?\)")


def mesh(cell: Cell, run: RunTrace) -> dict[str, Any] | None:
    """Return the mesh of a training, and the parts of parameters that each rank holds.

    Args:
        cell: The cell of the training.
        run: The training: one process group, with a record of each rank after ``build``.

    Returns:
        Data as above. None if there is nothing to draw: a mesh of one dimension, without tensor or
            pipeline parallelism.
    """
    snapshots = run.at("build")
    parameters_by_rank = _parameters_by_rank(cell, run)
    dims = _widest_mesh(parameters_by_rank)
    if not parameters_by_rank:
        return None
    has_parts_of_model = cell.tp > 1 or cell.pp > 1
    if len(dims) < 2 and not has_parts_of_model:
        return None
    dim_rows: list[dict[str, Any]] = []
    for dim in dims:
        dim_rows.append({"name": dim.name, "size": dim.size})
    coordinates: list[list[int]] = []
    for parameters in parameters_by_rank:
        coordinates.append(_coordinate(parameters.values(), dims))
    if not _tell_ranks_apart(coordinates, dims):
        # No parameter lies on a mesh of all ranks. Then ranks are drawn in a row.
        dim_rows = [{"name": "rank", "size": run.world_size}]
        coordinates = [[snapshot.rank] for snapshot in snapshots]
    rank_rows = []
    for snapshot, coordinate in zip(snapshots, coordinates, strict=True):
        rank_rows.append({"rank": snapshot.rank, "at": coordinate})
    layouts = _layouts(parameters_by_rank)
    return {"dims": dim_rows, "ranks": rank_rows, "layouts": layouts}


#: Name in the unwrapped model (before anything wraps it) -> the parameter as a rank holds it.
_Parameters = dict[str, ParameterInfo]


def _parameters_by_rank(cell: Cell, run: RunTrace) -> list[_Parameters]:
    """Return the parameters of each rank after ``build``, in rank order."""
    unwrapped = run.unwrapped
    unwrapped_keys: set[str] = set()
    if unwrapped:
        unwrapped_keys.update(info.name for info in unwrapped.parameters)
        unwrapped_keys.update(unwrapped.state_dict)
    strategy = STRATEGIES.get(cell.strategy)
    parameters_by_rank = []
    for snapshot in run.at("build"):
        parameters: _Parameters = {}
        for info in snapshot.parameters:
            # Without the prefixes of wrappers, such as ``module.``.
            name = strategy.canonical(info.name, cell, unwrapped_keys)
            parameters[name] = info
        parameters_by_rank.append(parameters)
    return parameters_by_rank


def _widest_mesh(parameters_by_rank: Iterable[_Parameters]) -> tuple[MeshDim, ...]:
    """Return the dimensions of the mesh that has most of them, of all parameters on all ranks."""
    widest: tuple[MeshDim, ...] = ()
    for parameters in parameters_by_rank:
        for info in parameters.values():
            dims = _dims(info)
            if len(dims) > len(widest):
                widest = dims
    return widest


def _tell_ranks_apart(coordinates: Sequence[Sequence[int]], dims: Sequence[MeshDim]) -> bool:
    """Tell whether each rank has a coordinate in each dimension, and no two ranks have the same."""
    different: set[tuple[int, ...]] = set()
    for coordinate in coordinates:
        if len(coordinate) != len(dims):
            return False
        different.add(tuple(coordinate))
    return len(different) == len(coordinates)


@dataclass(frozen=True)
class _Layout:
    """How a parameter is spread over the ranks.

    Attributes:
        shape: Its shape, as a whole.
        placement: Its placement on the lowest rank, as text: ``dp_shard=Shard(0)``.
        parts: The part that each rank holds, in rank order: ``0:4, :``.
    """

    shape: tuple[int, ...]
    placement: str
    parts: tuple[str, ...]


def _layouts(parameters_by_rank: Sequence[_Parameters]) -> list[dict[str, Any]]:
    """Return the distinct layouts, each with the names of the parameters that have it."""
    names_by_layout: dict[_Layout, list[str]] = {}
    for name, info in _first_of_each(parameters_by_rank).items():
        parts: list[str] = []
        for parameters in parameters_by_rank:
            parts.append(_part_on_rank(parameters.get(name)))
        layout = _Layout(info.shape, str(info.layout), tuple(parts))
        names_by_layout.setdefault(layout, []).append(name)
    rows = []
    for layout, names in names_by_layout.items():
        row = {
            "names": name_patterns(names),
            "shape": list(layout.shape),
            "placement": layout.placement,
            "parts": list(layout.parts),
        }
        rows.append(row)
    return rows


def _first_of_each(parameters_by_rank: Sequence[_Parameters]) -> _Parameters:
    """Return each parameter as the lowest rank that has it holds it.

    Under pipeline parallelism each rank has some of the layers. Then the parameters of the last
    stage come first.
    """
    # From the highest rank to the lowest: an update replaces what higher ranks have given.
    first: _Parameters = {}
    for parameters in reversed(parameters_by_rank):
        first.update(parameters)
    return first


def _part_on_rank(info: ParameterInfo | None) -> str:
    """Return the part of a parameter that a rank holds: ``0:4, :``, or ``none``.

    None is the parameter of another pipeline stage.
    """
    if info is None:
        return "none"
    return _part(info.shape, info.layout.dims)


def _dims(info: ParameterInfo) -> tuple[MeshDim, ...]:
    """Return the dimensions of the parameter's mesh that have several ranks."""
    dims: list[MeshDim] = []
    for dim in info.layout.dims:
        if dim.size > 1:
            dims.append(dim)
    return tuple(dims)


def _coordinate(parameters: Iterable[ParameterInfo], dims: Iterable[MeshDim]) -> list[int]:
    """Return the rank's coordinates in these dimensions, as far as its parameters have them."""
    # (name, size) of a dimension -> the rank's coordinate. The size is in the key, because experts
    # are on another mesh than other parameters, and both may have a dimension of the same name.
    coordinates: dict[tuple[str, int], int] = {}
    for info in parameters:
        for dim in _dims(info):
            coordinates[dim.name, dim.size] = dim.coordinate
    place: list[int] = []
    for dim in dims:
        coordinate = coordinates.get((dim.name, dim.size))
        if coordinate is not None:
            place.append(coordinate)
    return place


@functools.lru_cache(maxsize=1024)
def _part(shape: tuple[int, ...], dims: tuple[MeshDim, ...]) -> str:
    """Return the part of a tensor that a rank holds.

    It is a slice for each dimension (``0:8, :``), ``all``, ``none``, or ``flat piece 1 of 2`` of
    the flattened tensor.
    """
    # As ``held_indices`` takes them: the dimension of the tensor, in how many pieces another mesh
    # dimension had cut it before, in how many it is cut, and which of these the rank holds.
    cuts: list[tuple[int, int, int, int]] = []
    flat_pieces: list[str] = []
    for dim in dims:
        shard = _SHARD.fullmatch(dim.placement)
        if shard:
            tensor_dim = int(shard[1])
            cut_before = int(shard[2] or 1)
            cuts.append((tensor_dim, cut_before, dim.size, dim.coordinate))
        if dim.placement == FLAT:
            number = dim.coordinate + 1
            flat_pieces.append(f"flat piece {number} of {dim.size}")
    # ``held_indices`` gives the held indices of each dimension of the tensor.
    slices: list[str] = []
    for indices, size in zip(held_indices(shape, cuts), shape, strict=True):
        if len(indices) == 0:
            return "none"
        slices.append(_slices(indices, size))
    pieces: list[str] = []
    if set(slices) - {":"}:
        pieces.append(", ".join(slices))
    pieces += flat_pieces
    return "; ".join(pieces) or "all"


def _slices(rows: Sequence[int], size: int) -> str:
    """Return ascending numbers as slices: ``0:4``, ``0:4 + 8:12``; a colon for all of them."""
    if len(rows) == size:
        return ":"
    stretches: list[range] = []
    for row in rows:
        start = row
        if stretches and stretches[-1].stop == row:
            # The row follows the last stretch, so that stretch becomes longer.
            start = stretches.pop().start
        stretches.append(range(start, row + 1))
    texts = [f"{stretch.start}:{stretch.stop}" for stretch in stretches]
    return " + ".join(texts)
