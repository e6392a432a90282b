"""Shards of DTensors: which part of the full tensor this rank holds, from mesh and placements.

A DTensor of torch has a device mesh (a grid of ranks) and a placement for each dimension of it:
``Shard(0)`` along ``dp_shard``, ``Replicate`` along ``tp``. ``layouts.layout_of`` and
``layouts.starts_of`` call this module for each DTensor of each snapshot. An extension that runs one
process in place of several ranks calls ``alike_ranks``.

The part is described in two ways:

- by a ``Layout``, for checks: the mesh dimensions with this rank's place in them, and the ranks
  whose shards together are one full tensor;
- by *starts*, for digests (hashes of values at their positions), which need the position of each
  element in the flattened full tensor. These positions form runs of consecutive elements, all of
  the same length. Example: two ranks shard a matrix of shape (4, 6) on dimension 1. Rank 1 holds
  columns 3 to 5. Its runs have 3 elements each, and start at 3, 9, 15 and 21. A shard on
  dimension 0 is a single run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from pytest_distcompat.trace import WHOLE, Layout, MeshDim, held_indices


class Placement(NamedTuple):
    """The placement of a DTensor along one dimension of its mesh.

    It is a named tuple, because it is part of a cache key that is hashed for each tensor of each
    snapshot: a named tuple hashes faster than a dataclass.

    Attributes:
        text: ``Shard(0)``, ``Replicate``, ``StridedShard(0, 2)``.
        dim: The dimension of the tensor that is sharded; None if none is.
        split_factor: Into how many shards another mesh dimension has cut that dimension before; 1
            if none has. With tensor parallelism of size 2 FSDP2 shards with a factor of 2: each of
            its ranks has a piece of both halves.
    """

    text: str
    dim: int | None
    split_factor: int


class MeshPlace(NamedTuple):
    """A device mesh, and the place of this rank in it; a named tuple like ``Placement``.

    Attributes:
        ranks: The ranks of the mesh, flattened: ``(0, 1, 2, 3)``.
        sizes: The size of each mesh dimension: ``(2, 2)``.
        coordinate: This rank's index in each mesh dimension, ``(0, 1)`` for rank 1; empty if it is
            not in the mesh.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]


#: How one dimension of a mesh shards a tensor, as ``trace.held_indices`` takes it: the tensor's
#: dimension, the split factor, the size of the mesh dimension, and the rank's index in it.
_MeshCut = tuple[int, int, int, int]


def several_ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks in ascending order, as in ``Layout.holders``: empty for a single rank."""
    ordered = tuple(sorted(ranks))
    if len(ordered) == 1:
        return ()
    return ordered


#: The place of each rank in each mesh. Stored, because a mesh takes a millisecond to compute its
#: ranks.
_places: Any = weakref.WeakKeyDictionary()


def place_of_rank(mesh: Any) -> MeshPlace:
    """Return the ranks and sizes of a ``DeviceMesh``, and this rank's place in it."""
    # A process of a test may be several ranks, one after the other, so the rank is a key too.
    from torch import distributed

    rank = distributed.get_rank()
    place_by_rank: dict[int, MeshPlace] = _places.setdefault(mesh, {})
    if rank not in place_by_rank:
        ranks = tuple(mesh.mesh.flatten().tolist())
        sizes = tuple(mesh.shape)
        coordinate: tuple[int, ...] = ()
        if rank in ranks:
            coordinate = _unraveled(ranks.index(rank), sizes)
        place_by_rank[rank] = MeshPlace(ranks, sizes, coordinate)
    return place_by_rank[rank]


def _unraveled(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinate of an index in the flattened mesh: 3 in a (2, 2) mesh is (1, 1)."""
    coordinate: list[int] = []
    for size in reversed(sizes):
        index, along = divmod(index, size)
        coordinate.insert(0, along)
    return tuple(coordinate)


def placements_of(tensor: Any) -> tuple[Placement, ...]:
    """Return the placement of a DTensor along each dimension of its mesh."""
    # FSDP2 shards what tensor parallelism has sharded before as a ``_StridedShard``. The class is
    # private, so only its attributes are read.
    placements: list[Placement] = []
    for placement in tensor.placements:
        dim = getattr(placement, "dim", None)
        factor = int(getattr(placement, "split_factor", 1))
        text = type(placement).__name__.lstrip("_")
        if dim is not None and factor == 1:
            text = f"{text}({dim})"
        elif dim is not None:
            text = f"{text}({dim}, {factor})"
        placements.append(Placement(text, dim, factor))
    return tuple(placements)


@functools.lru_cache(maxsize=1024)
def dtensor_layout(
    names: tuple[str, ...],
    place: MeshPlace,
    placements: tuple[Placement, ...],
) -> Layout:
    """Return the layout of a DTensor.

    Args:
        names: The names of the mesh dimensions.
        place: The mesh, and this rank's place in it.
        placements: The placement along each mesh dimension.
    """
    if not place.coordinate:
        # This rank is not in the mesh, so it holds nothing that could be sharded. ``WHOLE`` is the
        # layout without mesh dimensions.
        return WHOLE
    dims: list[MeshDim] = []
    # Which ranks hold one full tensor together: along a mesh dimension that shards it all of them,
    # along one that replicates it those with this rank's index.
    selection: list[int | slice] = []
    for name, size, index, placement in zip(
        names, place.sizes, place.coordinate, placements, strict=True
    ):
        dims.append(MeshDim(name, size, coordinate=index, placement=placement.text))
        if placement.dim is None:
            selection.append(index)
        else:
            selection.append(slice(None))
    mesh = torch.tensor(place.ranks).view(place.sizes)
    holders = mesh[tuple(selection)].flatten().tolist()
    return Layout(tuple(dims), several_ranks(holders))


@functools.lru_cache(maxsize=1024)
def dtensor_starts(
    shape: tuple[int, ...],
    place: MeshPlace,
    placements: tuple[Placement, ...],
) -> torch.Tensor | None:
    """Return where the runs of a DTensor's local shard start in the flattened full tensor.

    Args:
        shape: The shape of the full tensor.
        place: The mesh, and this rank's place in it.
        placements: The placement along each mesh dimension.

    Returns:
        The starts, int64 and ascending: ``[3, 9, 15, 21]`` in the example at the top. None for a
        single run that starts at 0: a full tensor or an empty shard.
    """
    cuts: list[_MeshCut] = []
    # A rank that is not in the mesh has no coordinate, so for it nothing is sharded.
    for size, index, placement in zip(place.sizes, place.coordinate, placements, strict=False):
        if placement.dim is not None:
            cuts.append((placement.dim, placement.split_factor, size, index))
    local_indices: list[torch.Tensor] = []
    sharded_dims: list[int] = []
    for dim, indices in enumerate(held_indices(shape, cuts)):
        local_indices.append(torch.tensor(indices, dtype=torch.int64))
        if len(indices) != shape[dim]:
            sharded_dims.append(dim)
    is_empty = any(len(indices) == 0 for indices in local_indices)
    if not sharded_dims or is_empty:
        return None
    last_dim = sharded_dims[-1]
    # Dimensions after the last sharded one are complete. So consecutive indices of the last sharded
    # dimension are one run of elements, which starts where the first of these indices does.
    stride = math.prod(shape[last_dim + 1 :])
    starts = local_indices[last_dim] * stride
    # All runs must have the same length. So longer ones are cut into pieces of a common length, and
    # every ``run_length``-th index starts a piece.
    run_length = _common_run_length(local_indices[last_dim])
    starts = starts[::run_length]
    # The same runs repeat at each index of each dimension before it.
    for dim in reversed(range(last_dim)):
        stride = math.prod(shape[dim + 1 :])
        offsets = local_indices[dim] * stride
        starts = (offsets[:, None] + starts).flatten()
    return starts


def _common_run_length(indices: torch.Tensor) -> int:
    """Return the greatest length into which all runs of consecutive indices can be cut.

    It is 2 for the indices 0 to 3 and 8 to 9, whose runs have 4 and 2 indices.
    """
    is_break = torch.diff(indices) != 1
    breaks = is_break.nonzero().flatten().tolist()
    length = 0
    start = 0
    # The last run ends with the last index.
    for last in (*breaks, len(indices) - 1):
        end = last + 1
        length = math.gcd(length, end - start)
        start = end
    return length


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """All that the shape of each rank's shard of a DTensor depends on."""

    shape: tuple[int, ...]
    place: MeshPlace
    placements: tuple[Placement, ...]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of any rank, computed on rank 0.

        The mesh of rank 0 may lack the rank: with two tensor parallel ranks, rank 0's data parallel
        mesh has only every second rank. The rank then is in another mesh of the same shape, with
        the same distances between its ranks.
        """
        ranks = self.place.ranks
        cuts: list[_MeshCut] = []
        stride = math.prod(self.place.sizes)
        for size, placement in zip(self.place.sizes, self.placements, strict=True):
            # The distance of neighbours in this dimension in the flattened mesh: 2 and then 1 in a
            # (2, 2) mesh.
            stride //= size
            if placement.dim is None or size == 1:
                continue
            # The rank's coordinate in this mesh dimension.
            if rank in ranks:
                index = ranks.index(rank) // stride % size
            else:
                # ``ranks[0]`` is 0, so ``ranks[stride]`` is the distance of two neighbours as a
                # difference of ranks. It is the same in the mesh that has the rank.
                distance = ranks[stride]
                index = rank // distance % size
            cuts.append((placement.dim, placement.split_factor, size, index))
        # The indices of each dimension that the rank holds: ``[range(0, 4), range(3, 6)]``.
        indices_by_dim = held_indices(self.shape, cuts)
        return tuple(len(indices) for indices in indices_by_dim)


def alike_ranks(tensors: Iterable[Any], size: int) -> list[tuple[int, ...]]:
    """Return all ranks, grouped by the shapes of their shards; the last rank forms a group alone.

    An extension runs one process for each group in place of all its ranks. For 1000 ranks whose
    shards have one shape it runs two: one for ranks 0 to 998, one for rank 999. So a rank other
    than 0 is run even if all shards have one shape.

    Args:
        tensors: The tensors of rank 0, on which this is called.
        size: The number of ranks.
    """
    shardings: set[_Sharding] = set()
    for tensor in tensors:
        if hasattr(tensor, "placements"):
            shape = tuple(tensor.shape)
            place = place_of_rank(tensor.device_mesh)
            sharding = _Sharding(shape, place, placements_of(tensor))
            shardings.add(sharding)
    groups: dict[Any, list[int]] = {}
    for rank in range(size):
        local_shapes = tuple(sharding.local_shape(rank) for sharding in shardings)
        is_last = rank == size - 1 > 0
        groups.setdefault((local_shapes, is_last), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]
