"""Layouts: which shard of each full tensor this rank holds, whatever distributes the tensor.

A ``Layout`` has the dimensions of the device mesh (a grid of ranks) with the tensor's placement
along each, and the ranks whose shards together are one full tensor. ``live``, ``optimizer`` and
``gradients`` call this module for each parameter, state and gradient that they read. Layouts come
from three places:

- a DTensor (FSDP2, tensor parallelism) has a mesh of its own: ``meshes``;
- a plain tensor of FSDP1, DDP or ZeRO says nothing itself: its wrapper knows the process group.
  ``wrapper_layouts`` and ``partition_layout`` ask the wrappers;
- a plain tensor of DeepSpeed's AutoTP or MoE is marked by attributes: ``deepspeed_shards``.

Example: FSDP1 on 2 ranks joins parameters into one flattened tensor. On rank 1 the layout of each
of them is ``dp_shard=Flat`` with coordinate 1 of 2, and ``holders`` (0, 1). A layout without
``holders`` says that this rank alone holds the full tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.deepspeed_shards import (
    autotp_cut,
    dim_of_ranks,
    modules_of,
    moe_experts,
    parameters_of,
    ranks_of,
)
from pytest_distcompat.probe.meshes import (
    dtensor_layout,
    dtensor_starts,
    place_of_rank,
    placements_of,
)
from pytest_distcompat.trace import FLAT, REPLICATE, WHOLE, Layout

if TYPE_CHECKING:
    from torch.nn import Module


def layout_of(tensor: Any, other: Layout = WHOLE) -> Layout:
    """Return the layout of a DTensor, and ``other`` for any other tensor.

    A plain tensor does not say how it is distributed: the caller passes what its wrapper says.
    """
    if not hasattr(tensor, "placements"):
        return other
    mesh = tensor.device_mesh
    # A mesh may have no names for its dimensions; then they are empty.
    names = tuple(mesh.mesh_dim_names or ("",) * mesh.ndim)
    return dtensor_layout(names, place_of_rank(mesh), placements_of(tensor))


def starts_of(tensor: Any) -> torch.Tensor | None:
    """Return where the runs of a tensor's local shard start in the flattened full tensor.

    A run is a number of consecutive elements, the same for all runs of the tensor. The columns 3 to
    5 of a matrix of shape (4, 6) are runs of 3 elements that start at 3, 9, 15 and 21. Digests
    (hashes of values) need the starts, since they depend on the position of each element
    (``digests``).

    The starts are int64 and ascending. None stands for a single run that starts at 0.
    """
    cut = autotp_cut(tensor)
    if cut is not None:
        return cut.starts()
    if not hasattr(tensor, "placements"):
        return None
    shape = tuple(tensor.shape)
    return dtensor_starts(shape, place_of_rank(tensor.device_mesh), placements_of(tensor))


def flat_layout(group: Any, name: str = "dp_shard") -> Layout:
    """Return the layout of this rank's shard of a flattened tensor.

    Args:
        group: The process group, whose ranks hold consecutive shards in their order.
        name: The name of the mesh dimension that the group stands for.
    """
    from torch import distributed

    ranks = ranks_of(group)
    dim = dim_of_ranks(name, ranks, distributed.get_rank(), FLAT)
    if len(ranks) == 1:
        return Layout((dim,))
    return Layout((dim,), ranks)


def wrapper_layouts(model: Module | None) -> Mapping[int, Layout]:
    """Return the layouts of plain tensors that FSDP1, DDP or ZeRO distributes, by ``id``.

    DTensors are left out: they have layouts of their own.
    """
    from torch import distributed

    layouts = _fsdp1_and_ddp_layouts(model)
    for parameter in parameters_of(model):
        if hasattr(parameter, "ds_tensor"):
            # ZeRO-3: ``ds_tensor`` is this rank's shard of the flattened parameter.
            layouts[id(parameter)] = flat_layout(parameter.ds_process_group)
        elif hasattr(parameter, "_hp_mapping"):
            # ZeRO-1 and 2 shard the masters, to which ``_hp_mapping`` leads, while each rank has
            # all of the parameter. See ``partition_layout`` for the private names.
            group = parameter._dp_group  # noqa: SLF001 - see above
            layouts[id(parameter)] = _replicated(flat_layout(group, "dp_replicate"))
        # AutoTP cuts parameters before ZeRO distributes the pieces: its mesh dimension is added to
        # the layout that the piece has. ``cut`` is None for a parameter that it left whole.
        cut = autotp_cut(parameter)
        if cut is not None:
            layout_before = layouts.get(id(parameter), WHOLE)
            layouts[id(parameter)] = cut.layout(layout_before)
    for parameter_id, expert in moe_experts(model).items():
        layouts[parameter_id] = expert.layout(distributed.get_rank())
    return layouts


def _fsdp1_and_ddp_layouts(model: Module | None) -> dict[int, Layout]:
    """Return the layouts of what FSDP1 has flattened or DDP replicates, by ``id``.

    FSDP1 joins the parameters of a module into one 1-dimensional tensor, the flat parameter, and
    cuts that into equal pieces.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.nn.parallel import DistributedDataParallel

    layouts: dict[int, Layout] = {}
    for module in modules_of(model):
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
    """Return the layout of a replicated tensor on the same mesh: this rank has all of it."""
    dims = [dataclasses.replace(dim, placement=REPLICATE) for dim in layout.dims]
    return Layout(tuple(dims))


def partition_layout(model: Module | None, layouts: Mapping[int, Layout]) -> Layout:
    """Return the layout of flat masters, gradients and state, as ZeRO and FSDP1 shard them.

    A master is the float32 copy of a parameter that the optimizer updates. ZeRO joins the masters
    of many parameters into one flat tensor, of which each rank has one piece: its partition. The
    result is ``WHOLE`` where nothing is flat.

    Args:
        model: The trainer's model; None if it is not known.
        layouts: The ``wrapper_layouts`` of the model.
    """
    # ``_dp_group`` and ``_hp_mapping`` of ZeRO-1 and 2 are private;
    # ``tests/launch/test_private_names.py`` fails when they change. Experts are sharded over
    # another group. Their parameters have ``allreduce=False``.
    for parameter in parameters_of(model):
        if hasattr(parameter, "_hp_mapping") and getattr(parameter, "allreduce", True):
            return flat_layout(parameter._dp_group)  # noqa: SLF001 - see above
    for layout in layouts.values():
        if layout.flat:
            return layout
    return WHOLE
