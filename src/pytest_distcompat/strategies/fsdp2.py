"""FSDP2, torch's fully_shard: every parameter is a DTensor, sharded on its first dimension."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_distcompat.strategies import _expert, _fsdp, _tensor
from pytest_distcompat.strategies._base import DEEPSPEED_OPTIONS, Strategy, WrapSpec

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _torch(model: Module, precision: Precision, cell: Cell, device: torch.device, wrap: WrapSpec) -> Module:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    full_state = _move_to_meta(model) if cell.option("meta_init") else None
    if full_state is None:
        model.to(device)
    mesh = _fsdp.mesh(cell, device)
    if cell.tp > 1:
        # Beside expert parallelism they are cut along both dimensions at once.
        experts = wrap.experts if cell.ep == 1 else ""
        _tensor.parallelize(model, mesh["tp"], wrap.tp_plan, experts, sequence=bool(cell.option("sp")))
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]
    # By its name before a wrapper that recomputes it has that.
    spread: Any = model.get_submodule(wrap.experts) if cell.ep > 1 else None
    wrap.prepare(model)
    ignored = {parameter for module in wrap.modules_to_ignore(model) for parameter in module.parameters()}
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _fsdp.policy(2, precision, cell) or MixedPrecisionPolicy(),
        "reshard_after_forward": bool(cell.option("reshard_after_forward")),
        # Pinned memory needs a GPU.
        "offload_policy": CPUOffloadPolicy(
            **cell.with_settings("CPUOffloadPolicy", {"pin_memory": device.type == "cuda"})
        )
        if cell.option("cpu_offload")
        else OffloadPolicy(),
        "ignored_params": ignored or None,
    }
    settings = cell.with_settings("fully_shard", settings)
    blocks = wrap.units(model)
    if spread is not None:
        copies = int(cell.option("dp_replicate"))
        outer = ({"dp_replicate": copies} if copies > 1 else {}) | {"dp_shard": cell.dp_size // cell.ep // copies}
        sizes = outer | {"ep": cell.ep} | ({"tp": cell.tp} if cell.tp > 1 else {})
        both = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        _expert.spread(spread, both[tuple(sizes)[len(outer) :]])
        unit: Any = fully_shard(spread, **{**settings, "mesh": both[tuple(outer)]})
        # Their gradients are sums over the rows of several ranks already; the mean is over all.
        unit.set_gradient_divide_factor(float(cell.dp_size))
        # gloo cannot multiply while it sums; one rank would divide twice (docs/upstream.md).
        unit.set_force_sum_reduction_for_comms(enable=sizes["dp_shard"] > 1)
        blocks.remove(spread)
    # Blocks before the root, and those in another one before that: an outer unit then has the parameters of no inner one.
    for block in reversed(blocks):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    if chosen := cell.settings("prefetch"):
        Prefetch(**chosen).apply(blocks)
    if full_state is not None:
        _load_weights(model, full_state, torch.device("cpu") if cell.option("cpu_offload") else device)
    return model


@dataclass(frozen=True)
class Prefetch:
    """How many blocks each block has gathered early: of those after it in the forward, before it in the backward pass.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html (set_modules_to_forward_prefetch).
    """

    forward: int = 0
    backward: int = 0

    def apply(self, blocks: list[Any]) -> None:
        """Set what each of the blocks gathers early; they are in the order of the forward."""
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1 :][: self.forward])
            block.set_modules_to_backward_prefetch(blocks[:number][::-1][: self.backward])


def _move_to_meta(model: Module) -> dict[str, torch.Tensor]:
    """Move the model to the meta device and return its state dict with all its buffers."""
    full_state = {**model.state_dict(), **dict(model.named_buffers())}
    model.to("meta")
    return full_state


def _load_weights(model: Module, full_state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Allocate the shards and load rank 0's weights into them, and all buffers: some are not in the state dict."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device=device)
    saved: dict[str, Any] = {name: full_state[name] for name in model.state_dict()}
    set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
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
    accelerate=functools.partial(_fsdp.plugin, 2),
    transformers=functools.partial(_fsdp.arguments, 2),
    options={
        "no_use_orig_params": "FSDP2 has no flat parameters",
        **dict.fromkeys(
            ("model_branch", "model_hf:longcat_flash"),
            "all ranks must use the same parameters (https://github.com/pytorch/pytorch/issues/158719)",
        ),
        **DEEPSPEED_OPTIONS,
    },
    order=2,
)
