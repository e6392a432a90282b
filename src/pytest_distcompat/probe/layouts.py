"""Layouts: which shard of each full tensor this rank holds, of DTensors, FSDP1 and ZeRO.

A ``Layout`` has the dimensions of the device mesh, and the ranks whose shards together are one full
tensor.

A digest also needs the positions of a shard's elements in the flattened full tensor. They form runs
of consecutive elements, all of the same length. Example: two ranks shard a matrix of shape (4, 6)
on dimension 1. Rank 1 holds columns 3 to 5, so its runs have 3 elements each, and start at 3, 9, 15
and 21. A shard on dimension 0 is a single run. Functions with ``starts`` in their names return
where the runs start.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_distcompat.trace import FLAT, REPLICATE, STAGE, Layout, MeshDim, held_indices

if TYPE_CHECKING:
    from torch.nn import Module


class Placement(NamedTuple):
    """The placement of a DTensor along one dimension of its mesh.

    It is a named tuple, because it is part of a key that is hashed for each tensor of each
    snapshot.

    Attributes:
        text: ``Shard(0)``, ``Replicate``, ``StridedShard(0, 2)``.
        dim: The dimension of the tensor that is sharded; None if none is.
        split_factor: Into how many shards another mesh dimension has cut that dimension before; 1
            if none has.
    """

    text: str
    dim: int | None
    split_factor: int


class MeshPlace(NamedTuple):
    """A device mesh, and the place of this rank in it; a named tuple like ``Placement``.

    Attributes:
        ranks: The ranks of the mesh, flattened.
        sizes: The size of each mesh dimension.
        coordinate: This rank's index in each mesh dimension; empty if it is not in the mesh.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]


#: The layout of a tensor that this rank holds in full.
WHOLE = Layout()
#: How one dimension of a mesh shards a tensor, as ``trace.held_indices`` takes it: the tensor's
#: dimension, the split factor, the size of the mesh dimension, and the rank's index in it.
_MeshCut = tuple[int, int, int, int]


def layout_of(tensor: Any, other: Layout = WHOLE) -> Layout:
    """Return the layout of a DTensor, and ``other`` for any other tensor."""
    if not hasattr(tensor, "placements"):
        return other
    mesh = tensor.device_mesh
    names = tuple(mesh.mesh_dim_names or ("",) * mesh.ndim)
    return _layout(names, _place(mesh), _placements(tensor))


def starts_of(tensor: Any) -> torch.Tensor | None:
    """Return where the runs of a tensor's local shard start in the flattened full tensor.

    The starts are int64 and ascending. None stands for a single run that starts at 0.
    """
    cut = autotp_cut(tensor)
    if cut is not None:
        return cut.starts()
    if not hasattr(tensor, "placements"):
        return None
    shape = tuple(tensor.shape)
    return _starts(shape, _place(tensor.device_mesh), _placements(tensor))


@dataclasses.dataclass(frozen=True)
class Cut:
    """The shard of a parameter that DeepSpeed's AutoTP left on this rank.

    Attributes:
        shape: The shape of the full parameter.
        dim: The dimension of the parameter that is sharded.
        first: The shard's first index of that dimension.
        size: How many indices of that dimension it has.
        ranks: The ranks of tensor parallelism.
        coordinate: Which of them this rank is.
    """

    shape: tuple[int, ...]
    dim: int
    first: int
    size: int
    ranks: tuple[int, ...]
    coordinate: int

    def starts(self, start: int = 0, numel: int | None = None) -> torch.Tensor | None:
        """Return where the runs of this shard, or of a piece of it, start in the full parameter.

        Args:
            start: The number of the piece's first element in the flattened shard.
            numel: The number of its elements; None for the whole shard.
        """
        inner = math.prod(self.shape[self.dim + 1 :])
        row_numel = self.size * inner
        full_row_numel = self.shape[self.dim] * inner
        if numel is None:
            rows = math.prod(self.shape[: self.dim])
            numel = row_numel * rows
        if not numel:
            return None
        # The piece may begin and end within a row, so take a length that divides each of its runs.
        run_length = math.gcd(row_numel, start, numel)
        local_starts = torch.arange(start, start + numel, run_length)
        row = local_starts // row_numel
        column = local_starts % row_numel
        return row * full_row_numel + self.first * inner + column

    def layout(self, other: Layout = WHOLE) -> Layout:
        """Return the layout of this shard.

        Args:
            other: How ZeRO has sharded the shard further, over data parallel ranks.
        """
        rank = self.ranks[self.coordinate]
        holders: set[int] = set()
        for holder in other.holders or (rank,):
            # The distances between tensor parallel peers are the same for all ranks.
            for peer in self.ranks:
                holders.add(holder + peer - rank)
        placement = f"Shard({self.dim})"
        dim = MeshDim("tp", len(self.ranks), self.coordinate, placement)
        return Layout((*other.dims, dim), _several(holders))


def _several(ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks in ascending order; none if there is only one, as in ``Layout.holders``."""
    ordered = tuple(sorted(ranks))
    if len(ordered) == 1:
        return ()
    return ordered


def autotp_cut(parameter: Any) -> Cut | None:
    """Return the shard of a parameter that DeepSpeed's AutoTP left on this rank.

    The result is None if it has not sharded the parameter.
    """
    # There is no public mark. The attribute is that from which universal checkpoints are made. A
    # test in ``tests/launch/test_private_names.py`` fails when it changes.
    meta = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
    if not meta or not meta["partition_sizes"]:
        return None
    from deepspeed.utils import groups
    from torch import distributed

    ranks = _ranks_of(groups.get_tensor_model_parallel_group())
    coordinate = ranks.index(distributed.get_rank())
    sizes = meta["partition_sizes"]
    return Cut(
        shape=tuple(meta["logical_shape"]),
        dim=meta["partition_dim"],
        first=sum(sizes[:coordinate]),
        size=sizes[coordinate],
        ranks=ranks,
        coordinate=coordinate,
    )


def secondary_ranks(model: Module | None) -> int:
    """Return over how many ranks ZeRO++ shards the secondary copy of all weights (hpZ).

    The result is 0 if there is none.
    """
    # DeepSpeed drops the secondary shards at the end of each step, and makes them again in the next
    # forward. They have no public name; a test in ``tests/launch/test_private_names.py`` fails when
    # theirs changes.
    sizes: set[Any] = set()
    for parameter in _parameters(model):
        if not hasattr(parameter, "ds_secondary_tensor"):
            continue
        if parameter.ds_secondary_tensor is None:
            sizes.add(0)
        else:
            sizes.add(parameter.ds_secondary_tensor_group_size)
    if len(sizes) != 1:
        return 0
    return int(sizes.pop())


def _parameters(model: Module | None) -> list[Any]:
    if model is None:
        return []
    return list(model.parameters())


def _modules(model: Module | None) -> list[Any]:
    if model is None:
        return []
    return list(model.modules())


@dataclasses.dataclass(frozen=True)
class Expert:
    """One expert of DeepSpeed's MoE, and the ranks that hold it and the other experts.

    Attributes:
        local_number: The number of the expert among those of this rank, from 0.
        number: Its number among all experts, from 0.
        peers: The expert parallel ranks, which together hold all experts.
        replicas: The ranks that hold a replica of this expert.
    """

    local_number: int
    number: int
    peers: tuple[int, ...]
    replicas: tuple[int, ...]

    def layout(self, rank: int, *, flat: bool = False) -> Layout:
        """Return the layout of a parameter of the expert.

        Args:
            rank: This rank.
            flat: Whether it is the parameter's master, which ZeRO shards over the replicas.
        """
        if flat:
            data_parallel = _dim_of_ranks("dp_shard", self.replicas, rank, FLAT)
            same_expert = self.replicas
        else:
            data_parallel = _dim_of_ranks("dp_replicate", self.replicas, rank, REPLICATE)
            same_expert = (rank,)
        expert_parallel = _dim_of_ranks("ep", self.peers, rank, STAGE)
        holders: list[int] = []
        for holder in same_expert:
            # The distances between expert parallel peers are the same for all ranks.
            for peer in self.peers:
                holders.append(holder + peer - rank)
        return Layout((data_parallel, expert_parallel), tuple(sorted(holders)))


def _dim_of_ranks(name: str, ranks: tuple[int, ...], rank: int, placement: str) -> MeshDim:
    """Return the mesh dimension along which these ranks are, with the index of ``rank``."""
    return MeshDim(name, len(ranks), ranks.index(rank), placement)


def moe_experts(model: Module | None) -> Mapping[int, Expert]:
    """Return the expert of each parameter of DeepSpeed's MoE layers, by its ``id``."""
    # All attributes here are public but not documented: a test in
    # ``tests/launch/test_private_names.py`` fails when they change.
    from torch import distributed

    experts: dict[int, Expert] = {}
    modules = _modules(model)
    replica_groups = _expert_data_parallel_groups(modules)
    if not replica_groups:
        return experts
    for moe in modules:
        if not hasattr(moe, "deepspeed_moe") or moe.ep_size <= 1:
            continue
        peers = _ranks_of(moe.deepspeed_moe.ep_group)
        replicas = _ranks_of(replica_groups[moe.expert_group_name])
        first = peers.index(distributed.get_rank()) * moe.num_local_experts
        for local_number, module in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            expert = Expert(local_number, first + local_number, peers, replicas)
            for parameter in module.parameters():
                experts[id(parameter)] = expert
    return experts


def _expert_data_parallel_groups(modules: list[Any]) -> Mapping[str, Any]:
    """Return the process groups of the replicas of experts, by the name of a MoE layer's group."""
    for module in modules:
        if hasattr(module, "expert_data_parallel_group"):
            groups: Mapping[str, Any] = module.expert_data_parallel_group
            return groups
    return {}


def named_parameters(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield the model's ``named_parameters``, with global numbers of experts in the names.

    DeepSpeed numbers the experts of each rank from 0, but those in its files globally.
    """
    experts = moe_experts(model)
    for name, parameter in model.named_parameters():
        expert = experts.get(id(parameter))
        if expert is None:
            yield name, parameter
            continue
        local_part = f".deepspeed_experts.{expert.local_number}."
        global_part = f".deepspeed_experts.{expert.number}."
        yield name.replace(local_part, global_part), parameter


#: The place of each rank in each mesh. Stored, because a mesh takes a millisecond to compute its
#: ranks.
_places: Any = weakref.WeakKeyDictionary()


def _place(mesh: Any) -> MeshPlace:
    """Return a device mesh with this rank's place in it."""
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
    """Return the coordinate of an index in the flattened mesh, as ``numpy.unravel_index``."""
    coordinate: list[int] = []
    for size in reversed(sizes):
        index, along = divmod(index, size)
        coordinate.insert(0, along)
    return tuple(coordinate)


def _placements(tensor: Any) -> tuple[Placement, ...]:
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
def _layout(
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
        return WHOLE
    dims: list[MeshDim] = []
    # Which ranks hold one full tensor together: along a mesh dimension that shards it all of them,
    # along one that replicates it those with this rank's index.
    selection: list[int | slice] = []
    for name, size, index, placement in zip(
        names, place.sizes, place.coordinate, placements, strict=True
    ):
        dims.append(MeshDim(name, size, index, placement.text))
        selection.append(index if placement.dim is None else slice(None))
    mesh = torch.tensor(place.ranks).view(place.sizes)
    holders = mesh[tuple(selection)].flatten().tolist()
    return Layout(tuple(dims), _several(holders))


@functools.lru_cache(maxsize=1024)
def _starts(
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
        The starts, int64 and ascending; None for a single run that starts at 0.
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
    # dimension are one run, of which the first index is its start.
    stride = math.prod(shape[last_dim + 1 :])
    starts = local_indices[last_dim] * stride
    starts = starts[:: _common_run_length(local_indices[last_dim])]
    # The same runs repeat at each index of each dimension before it.
    for dim in reversed(range(last_dim)):
        stride = math.prod(shape[dim + 1 :])
        offsets = local_indices[dim] * stride
        starts = (offsets[:, None] + starts).flatten()
    return starts


def _common_run_length(indices: torch.Tensor) -> int:
    """Return the greatest length that divides all runs of consecutive indices: 2 for 0-3, 8-9."""
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
    """The shape of a DTensor, its mesh, and its placements."""

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
            # The distance of neighbours in this dimension in the flattened mesh.
            stride //= size
            if placement.dim is None or size == 1:
                continue
            if rank in ranks:
                strides = ranks.index(rank) // stride
            else:
                # In its mesh neighbours are as far apart as rank 0 and its neighbour.
                strides = rank // ranks[stride]
            cuts.append((placement.dim, placement.split_factor, size, strides % size))
        return tuple(len(indices) for indices in held_indices(self.shape, cuts))


def alike_ranks(tensors: Iterable[Any], size: int) -> list[tuple[int, ...]]:
    """Return all ranks, grouped by the shapes of their shards; the last rank forms a group alone.

    Args:
        tensors: The tensors of rank 0, on which this is called.
        size: The number of ranks.
    """
    shardings: set[_Sharding] = set()
    for tensor in tensors:
        if hasattr(tensor, "placements"):
            shape = tuple(tensor.shape)
            place = _place(tensor.device_mesh)
            shardings.add(_Sharding(shape, place, _placements(tensor)))
    groups: dict[Any, list[int]] = {}
    for rank in range(size):
        local_shapes = tuple(sharding.local_shape(rank) for sharding in shardings)
        is_last = rank == size - 1 > 0
        groups.setdefault((local_shapes, is_last), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _ranks_of(group: Any) -> tuple[int, ...]:
    from torch import distributed

    return tuple(distributed.get_process_group_ranks(group))


def flat_layout(group: Any, name: str = "dp_shard") -> Layout:
    """Return the layout of this rank's shard of a flattened tensor.

    Args:
        group: The process group, whose ranks hold consecutive shards in their order.
        name: The name of the mesh dimension that the group stands for.
    """
    from torch import distributed

    ranks = _ranks_of(group)
    dim = _dim_of_ranks(name, ranks, distributed.get_rank(), FLAT)
    if len(ranks) == 1:
        return Layout((dim,))
    return Layout((dim,), ranks)


def wrapper_layouts(model: Module | None) -> Mapping[int, Layout]:
    """Return the layouts of plain tensors that FSDP1, DDP or ZeRO distributes, by ``id``."""
    from torch import distributed

    layouts = _fsdp1_and_ddp_layouts(model)
    for parameter in _parameters(model):
        if hasattr(parameter, "ds_tensor"):
            layouts[id(parameter)] = flat_layout(parameter.ds_process_group)
        elif hasattr(parameter, "_hp_mapping"):
            # See ``partition_layout`` for the private names.
            group = parameter._dp_group  # noqa: SLF001 - see above
            layouts[id(parameter)] = _replicated(flat_layout(group, "dp_replicate"))
        cut = autotp_cut(parameter)
        if cut is not None:
            layout_before = layouts.get(id(parameter), WHOLE)
            layouts[id(parameter)] = cut.layout(layout_before)
    for parameter_id, expert in moe_experts(model).items():
        layouts[parameter_id] = expert.layout(distributed.get_rank())
    return layouts


def _fsdp1_and_ddp_layouts(model: Module | None) -> dict[int, Layout]:
    """Return the layouts of what FSDP1 has flattened or DDP replicates, by ``id``."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.nn.parallel import DistributedDataParallel

    layouts: dict[int, Layout] = {}
    for module in _modules(model):
        if isinstance(module, FullyShardedDataParallel):
            # Inner modules come later, so that the group of the innermost one counts. What FSDP1
            # has flattened has a private mark; ``tests/scripts/test_private_names.py`` fails when
            # it changes.
            layout = flat_layout(module.process_group)
            if module.sharding_strategy == ShardingStrategy.NO_SHARD:
                layout = _replicated(layout)
            for parameter in module.parameters():
                if getattr(parameter, "_fsdp_flattened", False):
                    layouts[id(parameter)] = layout
        elif isinstance(module, DistributedDataParallel):
            layout = _replicated(flat_layout(module.process_group, "dp_replicate"))
            for parameter in module.parameters():
                if not hasattr(parameter, "placements"):
                    layouts[id(parameter)] = layout
    return layouts


def _replicated(layout: Layout) -> Layout:
    """Return the layout of a replicated tensor on the same mesh."""
    dims = [dataclasses.replace(dim, placement=REPLICATE) for dim in layout.dims]
    return Layout(tuple(dims))


def partition_layout(model: Module | None, layouts: Mapping[int, Layout]) -> Layout:
    """Return the layout of flat masters, gradients and state, as ZeRO and FSDP1 shard them.

    Args:
        model: The trainer's model; None if it is not known.
        layouts: The ``wrapper_layouts`` of the model.
    """
    # ``_dp_group`` and ``_hp_mapping`` of ZeRO-1 and 2 are private;
    # ``tests/launch/test_private_names.py`` fails when they change. Experts are sharded over
    # another group. Their parameters have ``allreduce=False``.
    for parameter in _parameters(model):
        if hasattr(parameter, "_hp_mapping") and getattr(parameter, "allreduce", True):
            return flat_layout(parameter._dp_group)  # noqa: SLF001 - see above
    for layout in layouts.values():
        if layout.flat:
            return layout
    return WHOLE
