"""Layouts: which part of a tensor a rank holds.

A device mesh arranges ranks in a grid: four ranks as ``dp_shard`` of size 2 times ``tp`` of size 2,
say. Under FSDP2 with tensor parallelism a weight of shape (8, 4) may be cut along both dimensions
of that grid. The layout that rank 1 records for it then reads
``dp_shard=Shard(0), tp=Shard(1)``, with ``holders`` (0, 1, 2, 3), since these four ranks hold one
copy of the weight together.

On ranks ``probe.layouts`` makes layouts, of DTensors and of what FSDP1, DDP and ZeRO distribute. In
pytest's process checks and ``model_values`` use them to tell shards from replicas: a norm counts
replicas once, and shards add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: Placement along a dimension whose ranks all hold the same.
REPLICATE = "Replicate"
#: Placement along a dimension whose ranks hold pieces of the flattened tensor.
FLAT = "Flat"
#: Placement of a dimension of which this rank's coordinate alone holds the tensor: a stage of a
#: pipeline, an expert.
STAGE = "Stage"


@dataclass(frozen=True)
class MeshDim:
    """One dimension of a device mesh, and how a tensor is placed along it.

    Ranks are neighbours in the innermost dimension: on a mesh of ``dp_shard`` (size 2) times ``tp``
    (size 2) ranks 0 and 1 are ``tp`` peers. Rank 1 has coordinate 0 in ``dp_shard`` and 1 in
    ``tp``.

    Attributes:
        name: The name of the dimension, such as ``dp_shard``, ``tp`` or ``pp``; empty where the
            mesh has no names.
        size: How many ranks it has.
        coordinate: This rank's index along it, from 0.
        placement: ``Replicate`` (each rank holds the same), ``Shard(0)`` (each holds a piece of the
            tensor's dimension 0), ``StridedShard(0, 2)`` (a piece of each of 2 pieces that another
            mesh dimension has made) or ``Partial`` (their sum is the tensor), as torch's DTensor
            has them; ``Flat``: pieces of the flattened tensor in the order of the ranks, as FSDP1
            and ZeRO shard it; ``Stage``: this coordinate alone holds the tensor, as in ``pp``, and
            in ``ep`` of DeepSpeed's experts.
    """

    name: str
    size: int
    coordinate: int
    placement: str


@dataclass(frozen=True)
class Layout:
    """Which part of a tensor this rank holds.

    Attributes:
        dims: The dimensions of the tensor's mesh, the outermost first; none for a tensor that lies
            on no mesh.
        holders: The ranks that together hold one copy of the tensor (its shard group), in the order
            of their pieces if it is sharded flat; empty if this rank alone holds all of it. Of an
            expert that is a tensor of its own: the ranks that together hold one copy of all
            experts.
    """

    dims: tuple[MeshDim, ...] = ()
    holders: tuple[int, ...] = ()

    @property
    def region(self) -> tuple[tuple[str, int, int], ...]:
        """Return which part of the tensor it is; equal for replicas.

        It has (placement, size, coordinate) of each mesh dimension that shards the tensor:
        ``(("Shard(0)", 2, 1),)`` is the second of two pieces. It is empty for a whole tensor.
        """
        cuts: list[tuple[str, int, int]] = []
        for dim in self.dims:
            if dim.size > 1 and dim.placement not in {REPLICATE, STAGE}:
                cuts.append((dim.placement, dim.size, dim.coordinate))
        return tuple(cuts)

    @property
    def flat(self) -> bool:
        """Tell whether it is a piece of the flattened tensor.

        Where it begins follows from the sizes of the pieces before it.
        """
        placements = {dim.placement for dim in self.dims}
        return placements - {REPLICATE, STAGE} == {FLAT}

    def dim(self, name: str) -> MeshDim | None:
        """Return the dimension of that name, None if the tensor's mesh has none."""
        for dim in self.dims:
            if dim.name == name:
                return dim
        return None

    def __str__(self) -> str:
        # Findings show it: "dp_shard=Shard(0), tp=Replicate". A dimension without a name is shown
        # by its placement alone.
        texts = [f"{dim.name}={dim.placement}".lstrip("=") for dim in self.dims]
        return ", ".join(texts)


#: The layout of a tensor that this rank holds in full, outside of any mesh.
WHOLE = Layout()


def shard_groups(
    holders: Mapping[int, tuple[int, ...]], world_size: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each copy of a tensor: one shard group for each replica.

    Under hybrid sharding on 4 ranks in 2 replicas the result is ``((0, 1), (2, 3))``.

    Args:
        holders: Rank -> the ``Layout.holders`` that it reports. A rank that reports nothing, or
            itself alone because it holds no element, is in the group of its peers.
        world_size: Without any report, all these ranks are one group; with 0 there is no group.
    """
    reported = {group or (rank,) for rank, group in holders.items()}
    ranks_with_peers: set[int] = set()
    for group in reported:
        if len(group) > 1:
            ranks_with_peers.update(group)
    groups: list[tuple[int, ...]] = []
    for group in reported:
        if len(group) > 1 or group[0] not in ranks_with_peers:
            groups.append(group)
    if not groups and world_size:
        groups = [tuple(range(world_size))]
    return tuple(sorted(groups))


def held_indices(
    shape: Iterable[int], cuts: Iterable[tuple[int, int, int, int]]
) -> list[Sequence[int]]:
    """Return which indices of each dimension of a whole tensor a rank holds, ascending.

    For shape (4, 6) and the cut ``(1, 1, 2, 1)``, which is ``Shard(1)`` over 2 ranks for the second
    of them, the result is rows 0 to 3 and columns 3 to 5: ``[range(0, 4), range(3, 6)]``.

    Args:
        shape: That of the whole tensor.
        cuts: For each mesh dimension that cuts it, from the outermost: the tensor's dimension, into
            how many pieces that was cut before (1, or more for ``StridedShard``), the size of the
            mesh dimension, and the rank's coordinate.
    """
    indices_by_dim: list[Sequence[int]] = [range(size) for size in shape]
    for dim, pieces, size, coordinate in cuts:
        if pieces == 1:
            indices_by_dim[dim] = _chunk(indices_by_dim[dim], size, coordinate)
            continue
        # This rank has its chunk of each piece.
        indices: list[int] = []
        for nth in range(pieces):
            piece = _chunk(indices_by_dim[dim], pieces, nth)
            indices += _chunk(piece, size, coordinate)
        indices_by_dim[dim] = indices
    return indices_by_dim


def _chunk(indices: Sequence[int], count: int, nth: int) -> Sequence[int]:
    """Return the ``nth`` of ``count`` chunks as torch makes them, an empty one where torch stops.

    ``torch.chunk`` makes chunks of equal size, rounded up: 5 indices in 4 chunks are 2, 2 and 1.
    There is no fourth chunk, so the fourth rank holds nothing.
    """
    # https://docs.pytorch.org/docs/stable/generated/torch.chunk.html
    # Rounded up.
    size = -(-len(indices) // count)
    start = nth * size
    return indices[start : start + size]


def together(parts: Iterable[tuple[tuple[int, ...], float]]) -> tuple[tuple[int, ...], float]:
    """Return all holders of some sums of squares, and this rank's share of their total.

    The squares are those of this rank's parts of tensors, such as gradients. They are scaled so
    that the shares of all returned ranks add up to the total, with each replica counted once.
    Example: this rank alone holds a gradient with the square 6 (a replica, its holders are empty),
    and a shard with the square 4 together with ranks 0 and 1. The result is ``(0, 1)`` and
    6 / 2 + 4 = 7: rank 1 reports the other 3 of the replica.

    Args:
        parts: For each part the ranks that hold one copy together, empty for this rank alone, and
            this rank's sum of squares.
    """
    parts = tuple(parts)
    ranks: set[int] = set()
    for holders_of_part, _square in parts:
        ranks.update(holders_of_part)
    share = 0.0
    # What has no holders is held by this rank alone.
    holder_count = max(1, len(ranks))
    for holders_of_part, square in parts:
        part_holder_count = max(1, len(holders_of_part))
        share += square * part_holder_count / holder_count
    return tuple(sorted(ranks)), share
