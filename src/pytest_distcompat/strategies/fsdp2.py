"""The strategy ``fsdp2``: torch's fully_shard. Parameters are DTensors, sharded on dimension 0.

``_torch`` wraps a model for the driver of plain torch, on each rank: in this order it splits layers
for tensor parallelism, recomputes and compiles blocks, shards experts, and applies ``fully_shard``
to each block and then to the model. accelerate and Trainer do that themselves; they get arguments
by ``_fsdp.py``. ``FSDP2`` is the entry of the registry of strategies: a cell such as
``fsdp2-fp32-w4-tp_2``, one configuration under test, names it. ``_fsdp.mesh`` says what the
dimensions of the device mesh are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_distcompat.parallel import expert_parallel, tensor_parallel
from pytest_distcompat.strategies import _fsdp
from pytest_distcompat.strategies._base import DEEPSPEED_OPTIONS, Strategy, WrapSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _torch(
    model: Module, precision: Precision, cell: Cell, device: torch.device, wrap: WrapSpec
) -> Module:
    """Return the model sharded by FSDP2, for the driver of plain torch.

    The arguments are those of ``TorchConfig`` in ``_base.py``.
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    full_state: dict[str, torch.Tensor] | None = None
    if cell.option("meta_init"):
        full_state = _move_to_meta(model)
    else:
        model.to(device)
    mesh = _fsdp.mesh(cell, device)
    if cell.tp > 1:
        mesh = _split_layers(model, mesh, cell, wrap)
    experts: Any = None
    if cell.ep > 1:
        # Looked up before a wrapper that recomputes it takes its name.
        experts = model.get_submodule(wrap.experts)
    # Activation checkpointing and torch.compile of single blocks, as the cell asks.
    wrap.prepare(model)
    ignored_params: set[torch.nn.Parameter] = set()
    for module in wrap.modules_to_ignore(model):
        ignored_params.update(module.parameters())
    settings = {
        "mesh": mesh,
        "ignored_params": ignored_params or None,
        **_settings_of_cell(precision, cell, device),
    }
    settings = cell.with_settings("fully_shard", settings)
    # The blocks to shard one by one, in the order of ``model.modules()``.
    blocks = wrap.units(model)
    if experts is not None:
        _shard_experts(experts, cell, device, settings)
        blocks.remove(experts)
    # Blocks before the root, and those in another one before that: an outer unit then has the
    # parameters of no inner one.
    for block in reversed(blocks):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    prefetch = cell.settings("prefetch")
    if prefetch:
        Prefetch(**prefetch).apply(blocks)
    if full_state is not None:
        # From the meta device: allocate the shards where they stay, and fill them.
        if cell.option("cpu_offload"):
            device = torch.device("cpu")
        _load_weights(model, full_state, device)
    return model


def _settings_of_cell(precision: Precision, cell: Cell, device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` that follow from precision and options alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {
        "mp_policy": _fsdp.policy(2, precision, cell) or MixedPrecisionPolicy(),
        "reshard_after_forward": bool(cell.option("reshard_after_forward")),
        "offload_policy": _offload_policy(cell, device),
    }


def _split_layers(model: Module, mesh: DeviceMesh, cell: Cell, wrap: WrapSpec) -> DeviceMesh:
    """Split layers for tensor parallelism in place, and return the mesh that is left to shard over.

    Args:
        model: The whole model.
        mesh: The mesh of the cell, with the dimension ``tp``.
        cell: The cell.
        wrap: The plan by which layers are split, and the name of the module of experts.
    """
    # Under expert parallelism experts are sharded along both dimensions at once, later.
    experts_name = wrap.experts if cell.ep == 1 else ""
    tensor_parallel.parallelize(
        model,
        mesh["tp"],
        wrap.tp_plan,
        experts_name,
        sequence=bool(cell.option("sp")),
    )
    dimensions = mesh.mesh_dim_names or ()
    data_dimensions = [name for name in dimensions if name != "tp"]
    return mesh[tuple(data_dimensions)]


def _offload_policy(cell: Cell, device: torch.device) -> Any:
    """Return torch's policy for where shards stay: on the device, or in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if not cell.option("cpu_offload"):
        return OffloadPolicy()
    # Pinned memory needs a GPU.
    settings = {"pin_memory": device.type == "cuda"}
    return CPUOffloadPolicy(**cell.with_settings("CPUOffloadPolicy", settings))


def _shard_experts(
    experts: Module, cell: Cell, device: torch.device, settings: dict[str, Any]
) -> None:
    """Shard a module of experts in place: by expert, by column under ``tp``, the rest by FSDP2.

    Its mesh has the dimension ``ep`` beside those of the other layers. The ranks of ``ep`` are
    ``dp_shard`` ranks of the other layers, so that ``dp_shard`` is smaller here by that factor. On
    8 ranks with ``ep=2`` and ``tp=2``, for example, the mesh is ``dp_shard=2, ep=2, tp=2``, while
    the other layers have ``dp_shard=4, tp=2``.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    replicas = int(cell.option("dp_replicate"))
    data_sizes = {}
    if replicas > 1:
        data_sizes["dp_replicate"] = replicas
    data_sizes["dp_shard"] = cell.dp_size // cell.ep // replicas
    expert_sizes = {"ep": cell.ep}
    if cell.tp > 1:
        expert_sizes["tp"] = cell.tp
    size_by_name = data_sizes | expert_sizes
    names = tuple(size_by_name)
    sizes = tuple(size_by_name.values())
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    expert_parallel.spread(experts, mesh[tuple(expert_sizes)])
    settings = {**settings, "mesh": mesh[tuple(data_sizes)]}
    unit: Any = fully_shard(experts, **settings)
    # Their gradients are sums over the rows of several ranks already; the mean is over all.
    unit.set_gradient_divide_factor(float(cell.dp_size))
    # gloo cannot multiply while it sums; one rank would divide twice (docs/upstream.md).
    unit.set_force_sum_reduction_for_comms(enable=data_sizes["dp_shard"] > 1)


def on_last_dimension(parameter: torch.nn.Parameter) -> Any:
    """Return the placement on a parameter's last dimension, as a ``shard_placement_fn``.

    None, for the default placement, unless that dimension divides by 4 ranks. A cell names it by
    its import path, in the setting ``fully_shard.shard_placement_fn``.
    """
    from torch.distributed.tensor import Shard

    if parameter.dim() < 2 or parameter.shape[-1] % 4:
        return None
    return Shard(parameter.dim() - 1)


@dataclass(frozen=True)
class Prefetch:
    """How many blocks each block has gathered early, as the settings ``prefetch.forward=1`` say.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    (set_modules_to_forward_prefetch).

    Attributes:
        forward: How many of those after it, in its forward.
        backward: How many of those before it, in its backward pass.
    """

    forward: int = 0
    backward: int = 0

    def apply(self, blocks: list[Any]) -> None:
        """Set what each of the blocks gathers early; they are in the order of the forward."""
        for number, block in enumerate(blocks):
            following = blocks[number + 1 :]
            # The nearest first.
            preceding = blocks[:number][::-1]
            block.set_modules_to_forward_prefetch(following[: self.forward])
            block.set_modules_to_backward_prefetch(preceding[: self.backward])


def _move_to_meta(model: Module) -> dict[str, torch.Tensor]:
    """Move the model to the meta device, without values, and return its values before by name."""
    full_state = {**model.state_dict(), **dict(model.named_buffers())}
    model.to("meta")
    return full_state


def _load_weights(model: Module, full_state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Allocate the shards and load rank 0's weights into them, and each rank's own buffers.

    Some buffers are not in the state dict, so that they are copied by hand.
    """
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device=device)
    saved: dict[str, Any] = {name: full_state[name] for name in model.state_dict()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, saved, options=options)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(full_state[name])


FSDP2 = Strategy(
    "fsdp2",
    meaning="torch.distributed.fsdp.fully_shard: parameters are DTensors",
    dtypes=_fsdp.dtypes,
    wrapper="FSDP2",
    kind="DTensor",
    shards=True,
    torch=_torch,
    # For version 2 of FSDP.
    accelerate=functools.partial(_fsdp.plugin, 2),
    transformers=functools.partial(_fsdp.arguments, 2),
    options={
        "no_use_orig_params": "FSDP2 has no flat parameters",
        **dict.fromkeys(
            ("model_branch", "model_hf:longcat_flash"),
            (
                "all ranks must use the same parameters "
                "(https://github.com/pytorch/pytorch/issues/158719)"
            ),
        ),
        **DEEPSPEED_OPTIONS,
    },
    order=2,
)
