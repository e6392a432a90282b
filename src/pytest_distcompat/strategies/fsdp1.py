"""The strategy ``fsdp1``: torch's FullyShardedDataParallel, with flat parameters, sharded.

FSDP1 joins the parameters of a unit (a block, for example) to one vector, the flat parameter. Each
rank holds a piece of it. With ``use_orig_params`` modules still show parameters under their own
names, which are views of that piece.

``_torch`` wraps a model on each rank, for the driver (the class by which a trainer is tested) of
plain torch; accelerate and Trainer get arguments by ``_fsdp.py``. ``FSDP1`` is the entry of the
registry of strategies: a cell such as ``fsdp1-bf16_upcast-w2``, one configuration under test, names
it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from pytest_distcompat.strategies import _fsdp
from pytest_distcompat.strategies._base import DEEPSPEED_OPTIONS, Dtypes, Strategy, WrapSpec

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _torch(
    model: Module, precision: Precision, cell: Cell, device: torch.device, wrap: WrapSpec
) -> Module:
    """Return the model wrapped by FSDP1, for the driver of plain torch.

    Args:
        model: The model on the CPU.
        precision: The cell's dtypes.
        cell: The cell.
        device: That of this rank.
        wrap: Which modules are wrapped one by one.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    unit_classes = {type(block) for block in wrap.units(model)}
    mesh = None
    if cell.option("dp_replicate") != 1:
        mesh = _fsdp.mesh(cell, device)
        sharding = ShardingStrategy.HYBRID_SHARD
    elif cell.option("reshard_after_forward"):
        sharding = ShardingStrategy.FULL_SHARD
    else:
        sharding = ShardingStrategy.SHARD_GRAD_OP
    settings = {
        "auto_wrap_policy": ModuleWrapPolicy(unit_classes),
        "mixed_precision": _fsdp.policy(1, precision, cell),
        "device_id": device,
        "use_orig_params": bool(cell.option("use_orig_params")),
        "sharding_strategy": sharding,
        "device_mesh": mesh,
        "ignored_modules": wrap.modules_to_ignore(model),
    }
    wrapped = FullyShardedDataParallel(
        model, **cell.with_settings("FullyShardedDataParallel", settings)
    )
    # Blocks are recomputed inside the units, as in its tutorial: around them units are gathered
    # twice, and ``get_state_dict`` leaves ``_fsdp_wrapped_module`` in the optimizer's names.
    wrap.prepare(model)
    return wrapped


def _dtypes(precision: Precision) -> Dtypes:
    """Return the dtypes of FSDP, with buffers in the compute dtype from the first forward on."""
    # ``MixedPrecision(buffer_dtype=...)`` does that; accelerate sets it too.
    dtypes_of_fsdp = _fsdp.dtypes(precision)
    if not precision.mixed:
        return dtypes_of_fsdp
    return dataclasses.replace(dtypes_of_fsdp, buffer=precision.compute)


FSDP1 = Strategy(
    "fsdp1",
    meaning="torch.distributed.fsdp.FullyShardedDataParallel: flat parameters, sharded",
    dtypes=_dtypes,
    # The wrapper and the kind of parameters that a probe must find on each rank.
    wrapper="FSDP1",
    kind="FSDP1 shard",
    shards=True,
    # On one rank FSDP1 turns every sharding strategy into NO_SHARD, whose parameters are full,
    # plain tensors.
    kind_alone="Tensor",
    # What FSDP1 puts into parameter names: ``blocks.0._fsdp_wrapped_module.weight``.
    wrappers=("_fsdp_wrapped_module",),
    torch=_torch,
    accelerate=functools.partial(_fsdp.plugin, 1),
    transformers=functools.partial(_fsdp.arguments, 1),
    # Options of a cell that it does not have, as a cell's id spells them -> why.
    options={
        **dict.fromkeys(
            ("tp_2", "tp_4"),
            "of both, torch composes only FSDP2 with tensor parallelism on one mesh",
        ),
        "meta_init": (
            "FSDP1 fills what was made on the meta device by synchronising module states, "
            "which needs a GPU"
        ),
        "cpu_offload": "FSDP1 offloads from an accelerator to the CPU, and there is none",
        "cpu_ram_efficient_loading": "FSDP1 then synchronises module states, which needs a GPU",
        **DEEPSPEED_OPTIONS,
    },
    order=1,
)
