"""Layouts: which part of each whole tensor this rank holds, of DTensors and of plain tensors that FSDP1 and ZeRO shard.

A layout names the mesh dimensions and the ranks that hold the tensor together. For digests it must be known besides where the
elements of a local part stand in the flattened whole. They stand there in runs of consecutive elements, all equally long: of a
matrix of shape (4, 6) that two ranks shard on dimension 1, rank 1 holds columns 3 to 5, so its runs have 3 elements and start at
3, 9, 15 and 21. A shard on dimension 0 is a single run. Functions with ``starts`` in their names return the starts of runs.
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
    """How a DTensor lies along one dimension of its mesh.

    A named tuple, because it is part of a cache's key that is hashed for each tensor of each snapshot.

    Attributes:
        text: ``Shard(0)``, ``Replicate``, ``StridedShard(0, 2)``.
        dim: The dimension of the tensor that is sharded; None where none is.
        split_factor: In how many pieces another mesh dimension has sharded that dimension before; 1 if none has.
    """

    text: str
    dim: int | None
    split_factor: int


class MeshPlace(NamedTuple):
    """A device mesh, and where this rank is in it; a named tuple as ``Placement`` is.

    Attributes:
        ranks: The ranks of the mesh, flattened.
        sizes: The size of each mesh dimension.
        coordinate: This rank's index in each mesh dimension; empty if it is no part of the mesh.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]


#: This rank holds the whole tensor.
WHOLE = Layout()


def layout_of(tensor: Any, other: Layout = WHOLE) -> Layout:
    """Return the layout of a DTensor, and ``other`` for any other tensor."""
    if not hasattr(tensor, "placements"):
        return other
    mesh = tensor.device_mesh
    names = tuple(mesh.mesh_dim_names or ("",) * mesh.ndim)
    return _layout(names, _place(mesh), _placements(tensor))


def starts_of(tensor: Any) -> torch.Tensor | None:
    """Return where the runs of a tensor's local part start in the flattened whole, int64, ascending; None for one run from 0."""
    cut = autotp_cut(tensor)
    if cut is not None:
        return cut.starts()
    if not hasattr(tensor, "placements"):
        return None
    return _starts(tuple(tensor.shape), _place(tensor.device_mesh), _placements(tensor))


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
        """Return where the runs of this rank's part, or of a piece of the part, start in the flattened full parameter.

        Args:
            start: The piece's first element, by its number in the flattened part.
            numel: How many elements it has; None for the whole part.
        """
        inner = math.prod(self.shape[self.dim + 1 :])
        row_numel = self.size * inner
        full_row_numel = self.shape[self.dim] * inner
        if numel is None:
            numel = row_numel * math.prod(self.shape[: self.dim])
        if not numel:
            return None
        # The piece may begin and end within a row: this length divides each run of it.
        run_length = math.gcd(row_numel, start, numel)
        local_starts = torch.arange(start, start + numel, run_length)
        row = local_starts // row_numel
        column = local_starts % row_numel
        return row * full_row_numel + self.first * inner + column

    def layout(self, other: Layout = WHOLE) -> Layout:
        """Return the layout of this part, or of this rank's piece of it that has the ``other`` layout."""
        rank = self.ranks[self.coordinate]
        holders: set[int] = set()
        for holder in other.holders or (rank,):
            # A holder's peers in tensor parallelism are as far from it as this rank's are from this rank.
            holders.update(holder + peer - rank for peer in self.ranks)
        dim = MeshDim("tp", len(self.ranks), self.coordinate, f"Shard({self.dim})")
        return Layout((*other.dims, dim), _several(holders))


def _several(ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks in ascending order; none if there is only one, as ``Layout.holders`` wants it."""
    ordered = tuple(sorted(ranks))
    if len(ordered) == 1:
        return ()
    return ordered


def autotp_cut(parameter: Any) -> Cut | None:
    """Return how DeepSpeed's AutoTP has cut a parameter; None if it has not, or says too little of how."""
    # Parameters have no public mark. What universal checkpoints are made from says it; a test of
    # ``tests/launch/test_private_names.py`` fails when it changes.
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
    """Return over how many ranks ZeRO++ shards its second copy of all weights (hpZ); 0 if there is none, or not now."""
    # DeepSpeed drops these partitions at the end of each step, makes them again in the next forward, and has no public name for
    # them; a test of ``tests/launch/test_private_names.py`` fails when it changes.
    sizes: set[Any] = set()
    for parameter in _parameters(model):
        if hasattr(parameter, "ds_secondary_tensor"):
            is_kept = parameter.ds_secondary_tensor is not None
            sizes.add(parameter.ds_secondary_tensor_group_size if is_kept else 0)
    return int(sizes.pop()) if len(sizes) == 1 else 0


def _parameters(model: Module | None) -> list[Any]:
    return [] if model is None else list(model.parameters())


def _modules(model: Module | None) -> list[Any]:
    return [] if model is None else list(model.modules())


@dataclasses.dataclass(frozen=True)
class Expert:
    """Where one expert of DeepSpeed's MoE is: its number and the ranks that share the experts.

    Attributes:
        local_number: Its number among the experts of this rank, from 0.
        number: Its number among all experts.
        peers: The ranks of expert parallelism: together they hold all experts.
        replicas: The ranks that hold this expert, each the whole of it.
    """

    local_number: int
    number: int
    peers: tuple[int, ...]
    replicas: tuple[int, ...]

    def layout(self, rank: int, *, flat: bool = False) -> Layout:
        """Return the layout of the parameter, or of this rank's piece of its master that is sharded flat over the replicas."""
        if flat:
            data_parallel = MeshDim("dp_shard", len(self.replicas), self.replicas.index(rank), FLAT)
            same_expert = self.replicas
        else:
            data_parallel = MeshDim(
                "dp_replicate", len(self.replicas), self.replicas.index(rank), REPLICATE
            )
            same_expert = (rank,)
        expert_parallel = MeshDim("ep", len(self.peers), self.peers.index(rank), STAGE)
        holders: list[int] = []
        for holder in same_expert:
            # A holder's peers in expert parallelism are as far from it as this rank's are from this rank.
            holders.extend(holder + peer - rank for peer in self.peers)
        return Layout((data_parallel, expert_parallel), tuple(sorted(holders)))


def moe_experts(model: Module | None) -> Mapping[int, Expert]:
    """Map the ``id`` of each parameter of the experts that DeepSpeed's engine has spread over ranks to its place."""
    # DeepSpeed numbers a rank's experts from 0. All attributes here are public, and documented nowhere: a test of
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
    """Return the process groups of DeepSpeed's engine in which the replicas of an expert are, by the name of a MoE's group."""
    for module in modules:
        if hasattr(module, "expert_data_parallel_group"):
            groups: Mapping[str, Any] = module.expert_data_parallel_group
            return groups
    return {}


def named_parameters(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield what the model's ``named_parameters`` yields, experts of DeepSpeed's MoE by their numbers among all, as in files."""
    experts = moe_experts(model)
    for name, parameter in model.named_parameters():
        expert = experts.get(id(parameter))
        if expert is None:
            yield name, parameter
        else:
            local = f".deepspeed_experts.{expert.local_number}."
            yield name.replace(local, f".deepspeed_experts.{expert.number}."), parameter


#: Mesh -> rank -> place. A mesh computes its ranks anew each time, in a millisecond.
_places: Any = weakref.WeakKeyDictionary()


def _place(mesh: Any) -> MeshPlace:
    from torch import distributed

    rank = distributed.get_rank()
    place_by_rank: dict[int, MeshPlace] = _places.setdefault(mesh, {})
    if rank not in place_by_rank:
        ranks = tuple(mesh.mesh.flatten().tolist())
        sizes = tuple(mesh.shape)
        coordinate = _unraveled(ranks.index(rank), sizes) if rank in ranks else ()
        place_by_rank[rank] = MeshPlace(ranks, sizes, coordinate)
    return place_by_rank[rank]


def _unraveled(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index in each dimension for an index in the flattened mesh, as ``numpy.unravel_index``."""
    coordinate: list[int] = []
    for size in reversed(sizes):
        index, along = divmod(index, size)
        coordinate.insert(0, along)
    return tuple(coordinate)


def _placements(tensor: Any) -> tuple[Placement, ...]:
    # ``_StridedShard``, as FSDP2 shards what tensor parallelism has sharded before, is private; its attributes are read.
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
def _layout(names: tuple[str, ...], place: MeshPlace, placements: tuple[Placement, ...]) -> Layout:
    """Return the layout of a DTensor: its mesh dimensions, by these names, and the ranks that hold one copy of it together."""
    if not place.coordinate:
        return WHOLE
    dims: list[MeshDim] = []
    # The ranks that hold one copy together: along a dimension that shards all of them, along one that replicates those with this
    # rank's index.
    selection: list[int | slice] = []
    for name, size, index, placement in zip(
        names, place.sizes, place.coordinate, placements, strict=True
    ):
        dims.append(MeshDim(name, size, index, placement.text))
        selection.append(index if placement.dim is None else slice(None))
    holders = torch.tensor(place.ranks).view(place.sizes)[tuple(selection)].flatten().tolist()
    return Layout(tuple(dims), _several(holders))


@functools.lru_cache(maxsize=1024)
def _starts(
    shape: tuple[int, ...], place: MeshPlace, placements: tuple[Placement, ...]
) -> torch.Tensor | None:
    """Return where the runs of a DTensor's local part start in the flattened whole of this shape; None for one run from 0."""
    cuts: list[tuple[int, int, int, int]] = []
    # A rank that is no part of the mesh has no coordinate, so for it nothing is sharded.
    for size, index, placement in zip(place.sizes, place.coordinate, placements, strict=False):
        if placement.dim is not None:
            cuts.append((placement.dim, placement.split_factor, size, index))
    local_indices = [
        torch.tensor(indices, dtype=torch.int64) for indices in held_indices(shape, cuts)
    ]
    sharded_dims = [dim for dim, size in enumerate(shape) if len(local_indices[dim]) != size]
    is_empty = any(len(indices) == 0 for indices in local_indices)
    if not sharded_dims or is_empty:
        return None
    last_dim = sharded_dims[-1]
    # All dimensions after the last sharded one are whole, so a run is consecutive indices of the last sharded dimension. Only the
    # first of each stays.
    starts = local_indices[last_dim] * math.prod(shape[last_dim + 1 :])
    starts = starts[:: _common_run_length(local_indices[last_dim])]
    # The same runs stand at each index of each dimension before it.
    for dim in reversed(range(last_dim)):
        offsets = local_indices[dim] * math.prod(shape[dim + 1 :])
        starts = (offsets[:, None] + starts).flatten()
    return starts


def _common_run_length(indices: torch.Tensor) -> int:
    """Return the greatest length that divides all runs of consecutive indices: 2 for 0 1 2 3, 8 9."""
    breaks = (torch.diff(indices) != 1).nonzero().flatten().tolist()
    ends = [end + 1 for end in breaks]
    ends.append(len(indices))
    length = 0
    start = 0
    for end in ends:
        length = math.gcd(length, end - start)
        start = end
    return length


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """The shape of a DTensor, and how it lies on its mesh."""

    shape: tuple[int, ...]
    place: MeshPlace
    placements: tuple[Placement, ...]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of the DTensor, computed on rank 0.

        The mesh is that of rank 0, which may lack some ranks: with ``tp`` of two, those of the other ``tp`` coordinate.
        Any other rank has a mesh of its own, of the same shape and with the same distances between its ranks.
        """
        ranks = self.place.ranks
        cuts: list[tuple[int, int, int, int]] = []
        stride = math.prod(self.place.sizes)
        for size, placement in zip(self.place.sizes, self.placements, strict=True):
            # How far apart neighbours in this dimension are in the flattened mesh.
            stride //= size
            if placement.dim is None or size == 1:
                continue
            if rank in ranks:
                strides = ranks.index(rank) // stride
            else:
                # There neighbours are as far apart as rank 0 and its own neighbour.
                strides = rank // ranks[stride]
            cuts.append((placement.dim, placement.split_factor, size, strides % size))
        return tuple(len(indices) for indices in held_indices(self.shape, cuts))


def alike_ranks(tensors: Iterable[Any], size: int) -> list[tuple[int, ...]]:
    """Return all ranks, grouped by the shapes of the parts that they hold; the last rank is in a group of its own.

    Args:
        tensors: Those of rank 0, where this is called.
        size: The number of ranks.
    """
    shardings: set[_Sharding] = set()
    for tensor in tensors:
        if hasattr(tensor, "placements"):
            shardings.add(
                _Sharding(tuple(tensor.shape), _place(tensor.device_mesh), _placements(tensor))
            )
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
    """Return the layout of this rank's piece of a flattened tensor that the ranks of a process group hold in their order."""
    from torch import distributed

    ranks = _ranks_of(group)
    dim = MeshDim(name, len(ranks), ranks.index(distributed.get_rank()), FLAT)
    if len(ranks) == 1:
        return Layout((dim,))
    return Layout((dim,), ranks)


def wrapper_layouts(model: Module | None) -> Mapping[int, Layout]:
    """Map the ``id`` of each parameter that FSDP1 or ZeRO has sharded, or DDP or ZeRO replicated, to its layout."""
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
            layouts[id(parameter)] = cut.layout(layouts.get(id(parameter), WHOLE))
    for parameter_id, expert in moe_experts(model).items():
        layouts[parameter_id] = expert.layout(distributed.get_rank())
    return layouts


def _fsdp1_and_ddp_layouts(model: Module | None) -> dict[int, Layout]:
    """Map the ``id`` of each parameter that FSDP1 has flattened, or that DDP replicates, to its layout."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.nn.parallel import DistributedDataParallel

    layouts: dict[int, Layout] = {}
    for module in _modules(model):
        if isinstance(module, FullyShardedDataParallel):
            # Inner modules come later, and their groups count. What FSDP1 has flattened has a private mark;
            # ``tests/scripts/test_private_names.py`` fails when it changes.
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
    """Return the layout of a tensor that every rank holds whole, on the same mesh."""
    return Layout(tuple(dataclasses.replace(dim, placement=REPLICATE) for dim in layout.dims))


def partition_layout(model: Module | None, layouts: Mapping[int, Layout]) -> Layout:
    """Return the layout of flat partitions (masters, gradients, optimizer state) that ZeRO, or an optimizer of FSDP1, has.

    Args:
        model: The trainer's model; None if it is not known.
        layouts: The ``wrapper_layouts`` of the model.
    """
    # ``_dp_group`` and ``_hp_mapping`` of ZeRO-1 and 2 are private; ``tests/launch/test_private_names.py`` fails when they go.
    # Experts have a partition of their own, with another group: they are what is not reduced over all ranks (``allreduce``).
    for parameter in _parameters(model):
        if hasattr(parameter, "_hp_mapping") and getattr(parameter, "allreduce", True):
            return flat_layout(parameter._dp_group)  # noqa: SLF001 - see above
    for layout in layouts.values():
        if layout.flat:
            return layout
    return WHOLE
