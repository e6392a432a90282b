"""Layouts: which part of each whole tensor this rank holds, of DTensors and of plain tensors that FSDP1 and ZeRO shard."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.trace import FLAT, REPLICATE, STAGE, Layout, MeshDim, held_indices

if TYPE_CHECKING:
    from torch.nn import Module

#: Placements of one tensor, each as its text, its tensor dimension (None unless it shards) and its split factor.
_Placements = tuple[tuple[str, int | None, int], ...]
#: The ranks of a mesh, its sizes, and this rank's coordinate: empty if the rank is no part of it.
_Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

#: This rank holds the whole tensor.
WHOLE = Layout()


def layout_of(tensor: Any, other: Layout = WHOLE) -> Layout:
    """Return the layout of a DTensor, and ``other`` for any other tensor."""
    if not hasattr(tensor, "placements"):
        return other
    mesh = tensor.device_mesh
    return _layout(tuple(mesh.mesh_dim_names or ("",) * mesh.ndim), _place(mesh), _placements(tensor))


def starts_of(tensor: Any) -> torch.Tensor | None:
    """Return where the runs of a tensor's local part start in the flattened whole, see ``tensors.digest``; None for 0 alone."""
    if cut := autotp_cut(tensor):
        return cut.starts()
    if not hasattr(tensor, "placements"):
        return None
    return _starts(tuple(tensor.shape), _place(tensor.device_mesh), _placements(tensor))


@dataclasses.dataclass(frozen=True)
class Cut:
    """Part of a parameter that DeepSpeed's AutoTP left on this rank: ``size`` indices of dimension ``dim``, from ``first``.

    ``shape`` is that of the whole, ``ranks`` are those of tensor parallelism.
    """

    shape: tuple[int, ...]
    dim: int
    first: int
    size: int
    ranks: tuple[int, ...]
    coordinate: int

    def starts(self, start: int = 0, numel: int | None = None) -> torch.Tensor | None:
        """Return where the runs of ``numel`` elements from ``start`` on, in this rank's flattened part, start in the whole."""
        inner = math.prod(self.shape[self.dim + 1 :])
        run = self.size * inner
        if numel is None:
            numel = run * math.prod(self.shape[: self.dim])
        if not numel:
            return None
        at = torch.arange(start, start + numel, math.gcd(run, start, numel))
        return at // run * (self.shape[self.dim] * inner) + self.first * inner + at % run

    def layout(self, other: Layout = WHOLE) -> Layout:
        """Return the layout of this part, or of this rank's piece of it that has the ``other`` layout."""
        own = self.ranks[self.coordinate]
        holders = {one + peer - own for one in other.holders or (own,) for peer in self.ranks}
        dim = MeshDim("tp", len(self.ranks), self.coordinate, f"Shard({self.dim})")
        return Layout((*other.dims, dim), tuple(sorted(holders)) if len(holders) > 1 else ())


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
    coordinate, sizes = ranks.index(distributed.get_rank()), meta["partition_sizes"]
    first, shape = sum(sizes[:coordinate]), tuple(meta["logical_shape"])
    return Cut(shape, meta["partition_dim"], first, sizes[coordinate], ranks, coordinate)


def secondary_ranks(model: Module | None) -> int:
    """Return among how many ranks ZeRO++ has cut all weights a second time (hpZ); 0 if it has not, or not now."""
    # DeepSpeed drops these partitions at the end of each step, makes them again in the next forward, and has no public name for
    # them; a test of ``tests/launch/test_private_names.py`` fails when it changes.
    cut = (one for one in _parameters(model) if hasattr(one, "ds_secondary_tensor"))
    sizes = {one.ds_secondary_tensor_group_size if one.ds_secondary_tensor is not None else 0 for one in cut}
    return int(sizes.pop()) if len(sizes) == 1 else 0


def _parameters(model: Module | None) -> list[Any]:
    return list(model.parameters()) if model is not None else []


@dataclasses.dataclass(frozen=True)
class Expert:
    """A parameter of one expert of DeepSpeed's MoE: the numbers of its expert on this rank and among all, and its ranks.

    ``peers`` hold all experts together, ``replicas`` this one each.
    """

    here: int
    number: int
    peers: tuple[int, ...]
    replicas: tuple[int, ...]

    def layout(self, rank: int, *, flat: bool = False) -> Layout:
        """Return the layout of the parameter, or of this rank's piece of its master that its replicas have cut flat."""
        name, placement = ("dp_shard", FLAT) if flat else ("dp_replicate", REPLICATE)
        dims = (
            MeshDim(name, len(self.replicas), self.replicas.index(rank), placement),
            MeshDim("ep", len(self.peers), self.peers.index(rank), STAGE),
        )
        others = self.replicas if flat else (rank,)
        return Layout(dims, tuple(sorted(one + peer - rank for one in others for peer in self.peers)))


def moe_experts(model: Module | None) -> Mapping[int, Expert]:
    """Map the ``id`` of each parameter of the experts that DeepSpeed's engine has spread over ranks to its place."""
    # DeepSpeed numbers a rank's experts from 0. All attributes here are public, and documented nowhere: a test of
    # ``tests/launch/test_private_names.py`` fails when they change.
    from torch import distributed

    found: dict[int, Expert] = {}
    modules: list[Any] = list(model.modules()) if model is not None else []
    groups: Mapping[str, Any] = next(
        (one.expert_data_parallel_group for one in modules if hasattr(one, "expert_data_parallel_group")), {}
    )
    for moe in modules if groups else ():
        if hasattr(moe, "deepspeed_moe") and moe.ep_size > 1:
            peers, replicas = map(_ranks_of, (moe.deepspeed_moe.ep_group, groups[moe.expert_group_name]))
            first = peers.index(distributed.get_rank()) * moe.num_local_experts
            for here, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
                place = Expert(here, first + here, peers, replicas)
                found |= {id(parameter): place for parameter in expert.parameters()}
    return found


def named_parameters(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield what the model's ``named_parameters`` yields, experts of DeepSpeed's MoE by their numbers among all, as in files."""
    experts = moe_experts(model)
    for name, parameter in model.named_parameters():
        place = experts.get(id(parameter))
        here, number = (f".deepspeed_experts.{one}." for one in (place.here, place.number)) if place else ("", "")
        yield name.replace(here, number) if place else name, parameter


#: Mesh -> rank -> place. A mesh computes its ranks anew each time, in a millisecond.
_places: Any = weakref.WeakKeyDictionary()


def _place(mesh: Any) -> _Place:
    from torch import distributed

    rank, known = distributed.get_rank(), _places.setdefault(mesh, {})
    if rank not in known:
        ranks, sizes = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape)
        rest, coordinate = ranks.index(rank) if rank in ranks else -1, list[int]()
        for size in reversed(sizes if rest >= 0 else ()):
            rest, at = divmod(rest, size)
            coordinate.insert(0, at)
        known[rank] = ranks, sizes, tuple(coordinate)
    place: _Place = known[rank]
    return place


def _placements(tensor: Any) -> _Placements:
    # ``_StridedShard``, as FSDP2 shards what tensor parallelism has sharded before, is private; its attributes are read.
    found = []
    for placement in tensor.placements:
        dimension, factor = getattr(placement, "dim", None), int(getattr(placement, "split_factor", 1))
        text = type(placement).__name__.lstrip("_")
        text += "" if dimension is None else f"({dimension})" if factor == 1 else f"({dimension}, {factor})"
        found.append((text, dimension, factor))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _layout(names: tuple[str, ...], place: _Place, placements: _Placements) -> Layout:
    ranks, sizes, coordinate = place
    if not coordinate:
        return WHOLE
    dims = zip(names, sizes, coordinate, (text for text, _, _ in placements), strict=True)
    along = [slice(None) if dim is not None else at for at, (_, dim, _) in zip(coordinate, placements, strict=True)]
    holders = torch.tensor(ranks).view(sizes)[tuple(along)].flatten().tolist()
    return Layout(tuple(itertools.starmap(MeshDim, dims)), tuple(sorted(holders)) if len(holders) > 1 else ())


@functools.lru_cache(maxsize=1024)
def _starts(shape: tuple[int, ...], place: _Place, placements: _Placements) -> torch.Tensor | None:
    along = zip(*place[1:], placements, strict=False)
    cuts = ((dim, factor, size, at) for size, at, (_, dim, factor) in along if dim is not None)
    held = [torch.tensor(indices, dtype=torch.int64) for indices in held_indices(shape, cuts)]
    cut = [dim for dim, size in enumerate(shape) if len(held[dim]) != size]
    if not cut or not all(map(len, held)):
        return None
    *leading, last = (held[dim] * math.prod(shape[dim + 1 :]) for dim in range(cut[-1] + 1))
    # Of the last dimension that is cut, the elements in between are held whole: a run is as many rows as follow each other.
    breaks = (torch.diff(held[cut[-1]]) != 1).nonzero().flatten().tolist()
    ends = [0, *(end + 1 for end in breaks), len(last)]
    starts = last[:: math.gcd(*(end - start for start, end in itertools.pairwise(ends)))]
    for offsets in reversed(leading):
        starts = (offsets[:, None] + starts).flatten()
    return starts


def alike_ranks(tensors: Iterable[Any], size: int) -> list[tuple[int, ...]]:
    """Return all ranks in classes that hold parts of the same sizes, by the layouts of rank 0; the last rank is by itself."""
    placed = (one for one in tensors if hasattr(one, "placements"))
    cut = {(tuple(one.shape), _place(one.device_mesh), _placements(one)) for one in placed}
    found: dict[Any, list[int]] = {}
    for rank in range(size):
        parts = tuple(_part(*one, rank) for one in cut)
        found.setdefault((parts, rank == size - 1 > 0), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _part(shape: tuple[int, ...], place: _Place, placements: _Placements, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's part of a DTensor on rank 0's mesh.

    A rank that is not on that mesh has its own, of the same shape: those of another ``tp`` coordinate, say, that share a norm.
    """
    (ranks, sizes, _), cuts = place, list[tuple[int, int, int, int]]()
    below = math.prod(sizes)
    index = ranks.index(rank) if rank in ranks else None
    for size, (_, dim, pieces) in zip(sizes, placements, strict=True):
        below //= size
        if dim is not None and size > 1:
            at = rank // ranks[below] if index is None else index // below
            cuts.append((dim, pieces, size, at % size))
    return tuple(map(len, held_indices(shape, cuts)))


def _ranks_of(group: Any) -> tuple[int, ...]:
    from torch import distributed

    return tuple(distributed.get_process_group_ranks(group))


def flat_layout(group: Any, name: str = "dp_shard") -> Layout:
    """Return the layout of this rank's piece of a flattened tensor that the ranks of a process group hold in their order."""
    from torch import distributed

    ranks = _ranks_of(group)
    dims = (MeshDim(name, len(ranks), ranks.index(distributed.get_rank()), FLAT),)
    return Layout(dims, ranks if len(ranks) > 1 else ())


def wrapper_layouts(model: Module | None) -> Mapping[int, Layout]:
    """Map the ``id`` of each parameter that FSDP1 or ZeRO has sharded, or DDP or ZeRO replicated, to its layout."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.nn.parallel import DistributedDataParallel

    found: dict[int, Layout] = {}
    for module in model.modules() if model is not None else ():
        if isinstance(module, FullyShardedDataParallel):
            # Inner modules come later, and their groups count. What FSDP1 has flattened has a private mark;
            # ``tests/scripts/test_private_names.py`` fails when it changes.
            layout = flat_layout(module.process_group)
            if module.sharding_strategy == ShardingStrategy.NO_SHARD:
                layout = _replicated(layout)
            found |= {id(one): layout for one in module.parameters() if getattr(one, "_fsdp_flattened", False)}
        elif isinstance(module, DistributedDataParallel):
            layout = _replicated(flat_layout(module.process_group, "dp_replicate"))
            found |= {id(one): layout for one in module.parameters() if not hasattr(one, "placements")}
    for parameter in _parameters(model):
        if hasattr(parameter, "ds_tensor"):
            found[id(parameter)] = flat_layout(parameter.ds_process_group)
        elif hasattr(parameter, "_hp_mapping"):
            found[id(parameter)] = _replicated(flat_layout(parameter._dp_group, "dp_replicate"))  # noqa: SLF001 - see below
        if cut := autotp_cut(parameter):
            found[id(parameter)] = cut.layout(found.get(id(parameter), WHOLE))
    if experts := moe_experts(model):
        from torch import distributed

        found |= {parameter: place.layout(distributed.get_rank()) for parameter, place in experts.items()}
    return found


def _replicated(layout: Layout) -> Layout:
    return Layout(tuple(MeshDim(dim.name, dim.size, dim.coordinate, REPLICATE) for dim in layout.dims))


def partition_layout(model: Module | None, layouts: Mapping[int, Layout]) -> Layout:
    """Return the layout of flat partitions (masters, gradients, optimizer state) that ZeRO, or an optimizer of FSDP1, has.

    Args:
        model: The trainer's model; None if it is not known.
        layouts: The ``wrapper_layouts`` of the model.
    """
    # ``_dp_group`` and ``_hp_mapping`` of ZeRO-1 and 2 are private; ``tests/launch/test_private_names.py`` fails when they go.
    # That of experts is by itself.
    for parameter in _parameters(model):
        if hasattr(parameter, "_hp_mapping") and getattr(parameter, "allreduce", True):
            return flat_layout(parameter._dp_group)  # noqa: SLF001 - see above
    return next((layout for layout in layouts.values() if layout.flat), WHOLE)
