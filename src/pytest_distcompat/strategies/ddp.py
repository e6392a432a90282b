"""The strategy ``ddp``: every rank holds the whole model, gradients are all-reduced.

``_torch`` wraps a model for the driver of plain torch, on each rank; ``_accelerate`` and
``_transformers`` return arguments for these libraries, which wrap by DDP themselves. ``DDP`` is the
entry of the registry of strategies: a cell such as ``ddp-fp32-w2``, one configuration under test,
names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.strategies import _fsdp
from pytest_distcompat.strategies._base import (
    DEEPSPEED_OPTIONS,
    NO_SHARDS,
    Dtypes,
    Strategy,
    WrapSpec,
)

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _dtypes(precision: Precision) -> Dtypes:
    """Return the dtype of each kind of tensor under DDP."""
    # Mixed precision is autocast here: parameters and gradients keep the master's dtype, so
    # gradients are reduced in it.
    master = precision.master
    return Dtypes(
        storage=master,
        compute=precision.compute,
        reduce=master,
        gradient=master,
        master=master,
        state=master,
    )


def _torch(
    model: Module, precision: Precision, cell: Cell, device: torch.device, wrap: WrapSpec
) -> Module:
    """Return the model wrapped by DDP, for the driver of plain torch.

    The arguments are those of ``TorchConfig`` in ``_base.py``.
    """
    from torch.nn.parallel import DistributedDataParallel

    # Activation checkpointing and torch.compile of single blocks, as the cell asks.
    wrap.prepare(model)
    model.to(device)
    settings: dict[str, Any] = {"device_ids": None}
    if device.type == "cuda":
        settings["device_ids"] = [device.index]
    if cell.option("lora") == "int8":
        # At its start DDP broadcasts parameters by way of ``aten.view``, which torchao's tensors
        # lack. Without the broadcast ranks are equal too: all have quantized the same weights.
        settings["init_sync"] = False
    if cell.pp > 1:
        # Only the ranks with the same stage of the pipeline hold replicas of each other. ``mesh``
        # returns the mesh of these ranks.
        settings["process_group"] = _fsdp.mesh(cell, device).get_group()
    # The model may leave out parameters on a rank that other ranks use.
    if wrap.find_unused:
        settings["find_unused_parameters"] = True
    return DistributedDataParallel(model, **cell.with_settings("DistributedDataParallel", settings))


def _accelerate(precision: Precision, cell: Cell, wrap: WrapSpec) -> Mapping[str, Any]:
    """Return arguments of Accelerator, which wraps by DDP without any."""
    if not wrap.find_unused:
        return {}
    from accelerate.utils import DistributedDataParallelKwargs

    return {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}


def _transformers(precision: Precision, cell: Cell, wrap: WrapSpec) -> Mapping[str, Any]:
    """Return arguments of TrainingArguments, with which Trainer wraps by DDP without any."""
    if not wrap.find_unused:
        return {}
    return {"ddp_find_unused_parameters": True}


DDP = Strategy(
    "ddp",
    meaning="DistributedDataParallel: replicas, gradients all-reduced",
    dtypes=_dtypes,
    wrapper="DDP",
    kind="Tensor",
    shards=False,
    # On a single rank there may be no wrapper: accelerate, and with it Trainer, uses none on one
    # GPU (``Accelerator.multi_device``), though it does on one CPU rank.
    bare_alone=True,
    # The names of a wrapped model's parameters begin with ``module.``.
    leading=("module",),
    torch=_torch,
    accelerate=_accelerate,
    transformers=_transformers,
    # Options of a cell that it does not have, as a cell's id spells them -> why.
    options={
        "state_dict_full": "DDP has one form of state dict, the full one",
        "cpu_offload": "DDP has nothing to offload",
        **dict.fromkeys(
            ("tp_2", "tp_4"),
            "DistributedDataParallel takes no DTensors: it broadcasts them with plain tensors",
        ),
        "reduce_dtype_fp32": "gradients travel in the dtype that they are stored in",
        **DEEPSPEED_OPTIONS,
        **dict.fromkeys(
            (
                "no_reshard_after_forward",
                "dp_replicate_2",
                "no_use_orig_params",
                "cpu_ram_efficient_loading",
                "meta_init",
                "wrap_policy_size",
                "ignored_modules",
            ),
            NO_SHARDS,
        ),
    },
    order=0,
)
