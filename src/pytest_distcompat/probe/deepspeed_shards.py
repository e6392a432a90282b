"""Shards of DeepSpeed that are plain tensors: of AutoTP, of ZeRO++ and of experts (MoE).

DeepSpeed marks such tensors by attributes instead of a DTensor's mesh and placements. Each function
that reads such an attribute is tested in ``tests/launch/test_private_names.py``. Other modules of
the probe call this one for each model, ``layouts`` and ``live`` among them. For a model without
DeepSpeed its functions return None, 0 or nothing.

- AutoTP is DeepSpeed's tensor parallelism: it replaces a layer by one that has a piece of the
  weight. ``autotp_cut`` says which piece.
- hpZ, a part of ZeRO++, keeps a second shard of all weights among the ranks of one machine.
  ``secondary_ranks`` says over how many ranks.
- In a MoE layer each rank has some of the experts, small networks that share the tokens.
  ``moe_experts`` says which expert a parameter belongs to.

The results become parts of a ``Layout``: the dimensions of a grid of ranks with the tensor's
placement along each (``tp=Shard(0)``), and the ``holders``, the ranks that have one copy of the
tensor together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.meshes import several_ranks
from pytest_distcompat.trace import FLAT, REPLICATE, STAGE, WHOLE, Layout, MeshDim

if TYPE_CHECKING:
    from torch.nn import Module


@dataclasses.dataclass(frozen=True)
class Cut:
    """The shard of a parameter that DeepSpeed's AutoTP left on this rank.

    A weight of shape (6, 4) whose dimension 0 is cut between ranks 0 and 1 is, on rank 1,
    ``Cut(shape=(6, 4), dim=0, first=3, size=3, ranks=(0, 1), coordinate=1)``.

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

        A run is a number of consecutive elements, the same for all runs; digests need their
        positions (``meshes``). ZeRO cuts the flattened shard once more over data parallel ranks, so
        a master is of a piece of the shard.

        Args:
            start: The number of the piece's first element in the flattened shard.
            numel: The number of its elements; None for the whole shard.

        Returns:
            The starts, int64; None for an empty piece.
        """
        # A row is what the shard has for one index of all dimensions before the sharded one.
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
            # The distances between tensor parallel peers are the same for all ranks: if this rank 2
            # has the peer 3, the data parallel rank 0 has the peer 1.
            for peer in self.ranks:
                holders.add(holder + peer - rank)
        placement = f"Shard({self.dim})"
        dim = MeshDim("tp", len(self.ranks), self.coordinate, placement)
        # ``several_ranks`` sorts them, and returns nothing for this rank alone, as layouts have it.
        return Layout((*other.dims, dim), several_ranks(holders))


def autotp_cut(parameter: Any) -> Cut | None:
    """Return the shard of a parameter that AutoTP left on this rank; None for a whole parameter."""
    # There is no public mark. The attribute is that from which universal checkpoints are made. A
    # test in ``tests/launch/test_private_names.py`` fails when it changes.
    meta = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
    if not meta or not meta["partition_sizes"]:
        return None
    from deepspeed.utils import groups
    from torch import distributed

    ranks = ranks_of(groups.get_tensor_model_parallel_group())
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
    """Return over how many ranks ZeRO++ shards its secondary copy of all weights (hpZ).

    The result is 0 if there is no such copy, or if not all weights have one over as many ranks.
    """
    # DeepSpeed drops the secondary shards at the end of each step, and makes them again in the next
    # forward. They have no public name; a test in ``tests/launch/test_private_names.py`` fails when
    # theirs changes.
    sizes: set[Any] = set()
    for parameter in parameters_of(model):
        if not hasattr(parameter, "ds_secondary_tensor"):
            continue
        if parameter.ds_secondary_tensor is None:
            sizes.add(0)
        else:
            sizes.add(parameter.ds_secondary_tensor_group_size)
    if len(sizes) != 1:
        return 0
    return int(sizes.pop())


def parameters_of(model: Module | None) -> list[Any]:
    """Return the model's parameters; none if the model is not known."""
    if model is None:
        return []
    return list(model.parameters())


def modules_of(model: Module | None) -> list[Any]:
    """Return the model's modules, outer ones first; none if the model is not known."""
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
            data_parallel = dim_of_ranks("dp_shard", self.replicas, rank, FLAT)
            same_expert = self.replicas
        else:
            data_parallel = dim_of_ranks("dp_replicate", self.replicas, rank, REPLICATE)
            same_expert = (rank,)
        expert_parallel = dim_of_ranks("ep", self.peers, rank, STAGE)
        holders: list[int] = []
        for holder in same_expert:
            # The distances between expert parallel peers are the same for all ranks.
            for peer in self.peers:
                holders.append(holder + peer - rank)
        return Layout((data_parallel, expert_parallel), tuple(sorted(holders)))


def dim_of_ranks(name: str, ranks: tuple[int, ...], rank: int, placement: str) -> MeshDim:
    """Return the mesh dimension along which these ranks are, with the index of ``rank``."""
    return MeshDim(name, len(ranks), ranks.index(rank), placement)


def moe_experts(model: Module | None) -> Mapping[int, Expert]:
    """Return the expert that each parameter belongs to, by the ``id`` of the parameter.

    Parameters outside of DeepSpeed's MoE layers are left out, and so are those of layers whose
    experts each rank has in full (``ep_size`` 1).
    """
    # All attributes here are public but not documented: a test in
    # ``tests/launch/test_private_names.py`` fails when they change.
    from torch import distributed

    experts: dict[int, Expert] = {}
    modules = modules_of(model)
    replica_groups = _expert_data_parallel_groups(modules)
    if not replica_groups:
        return experts
    for moe in modules:
        if not hasattr(moe, "deepspeed_moe") or moe.ep_size <= 1:
            continue
        peers = ranks_of(moe.deepspeed_moe.ep_group)
        replicas = ranks_of(replica_groups[moe.expert_group_name])
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

    DeepSpeed numbers the experts of each rank from 0, but those in its files globally. With 4
    experts on 2 ranks rank 1 yields ``...deepspeed_experts.3.weight`` for its local expert 1.
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


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group, in their order in the group."""
    from torch import distributed

    return tuple(distributed.get_process_group_ranks(group))
