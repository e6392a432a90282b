"""DDP: every rank holds the whole model, gradients are all-reduced."""

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
    from torch.nn.parallel import DistributedDataParallel

    wrap.prepare(model)
    model.to(device)
    settings: dict[str, Any] = {"device_ids": None}
    if device.type == "cuda":
        settings["device_ids"] = [device.index]
    if cell.option("lora") == "int8":
        # DDP broadcasts flat tensors, which torchao's have no view for ('aten.view'). All ranks
        # have quantized the same.
        settings["init_sync"] = False
    if cell.pp > 1:
        settings["process_group"] = _fsdp.mesh(cell, device).get_group()
    if wrap.find_unused:
        settings["find_unused_parameters"] = True
    return DistributedDataParallel(model, **cell.with_settings("DistributedDataParallel", settings))


def _accelerate(precision: Precision, cell: Cell, wrap: WrapSpec) -> Mapping[str, Any]:
    if not wrap.find_unused:
        return {}
    from accelerate.utils import DistributedDataParallelKwargs

    return {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}


def _transformers(precision: Precision, cell: Cell, wrap: WrapSpec) -> Mapping[str, Any]:
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
    # accelerate, and with it Trainer, wraps no DDP on one GPU (``Accelerator.multi_device``); on
    # one CPU rank it does.
    bare_alone=True,
    leading=("module",),
    torch=_torch,
    accelerate=_accelerate,
    transformers=_transformers,
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
