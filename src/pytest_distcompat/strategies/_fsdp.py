"""Parts shared by FSDP1 and FSDP2: dtypes, mixed precision, device mesh, backend configs.

``fsdp1.py`` and ``fsdp2.py`` make the strategies of these functions; a strategy says how state is
split over ranks. A strategy's *backend config* is its arguments for a library in a cell, which is
one configuration under test: ``fsdp2-bf16_upcast-w2`` becomes an ``Accelerator`` with
``FullyShardedDataParallelPlugin(fsdp_version=2, ...)`` by ``plugin``, and
``TrainingArguments(fsdp=True, fsdp_config={"version": 2, ...})`` by ``arguments``. Drivers, the
classes by which trainers are tested, call them on each rank. Fields that the cell sets by its
option ``set``, as ``fsdp_config.min_num_params=7``, override the others
(``cell.with_settings``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pytest_distcompat.parallel.mesh import parallelism
from pytest_distcompat.strategies._base import Dtypes, WrapSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


#: Value of option ``state_dict`` -> accelerate's and transformers' name for it.
STATE_DICT_TYPES = {"sharded": "SHARDED_STATE_DICT", "full": "FULL_STATE_DICT"}


def dtypes(precision: Precision) -> Dtypes:
    """Return the dtypes that FSDP should have: shards and optimizer state in the master dtype.

    Matrix products and reductions are in the compute dtype. The check ``dtypes`` expects these, and
    the documentation's table of strategies has them as a row.
    """
    # As in the table of https://huggingface.co/blog/deepspeed-to-fsdp-and-back; accelerate sets the
    # reduce dtype to the compute dtype (``FullyShardedDataParallelPlugin.set_mixed_precision``).
    master, compute = precision.master, precision.compute
    return Dtypes(
        storage=master,
        compute=compute,
        reduce=compute,
        gradient=master,
        master=master,
        state=master,
    )


def policy(version: int, precision: Precision, cell: Cell) -> Any:
    """Return torch's MixedPrecision for FSDP1, its MixedPrecisionPolicy for FSDP2.

    None if the precision has one dtype only.

    Args:
        version: 1 or 2.
        precision: The cell's dtypes.
        cell: The cell; its option ``reduce_dtype`` may have gradients reduced in float32.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if not precision.mixed:
        return None
    compute: torch.dtype = getattr(torch, precision.compute)
    reduce = compute
    if cell.option("reduce_dtype") == "fp32":
        reduce = torch.float32
    if version == 1:
        settings = {"param_dtype": compute, "reduce_dtype": reduce, "buffer_dtype": compute}
        return MixedPrecision(**cell.with_settings("MixedPrecision", settings))
    settings = {"param_dtype": compute, "reduce_dtype": reduce}
    return MixedPrecisionPolicy(**cell.with_settings("MixedPrecisionPolicy", settings))


def mesh(cell: Cell, device: torch.device) -> DeviceMesh:
    """Return the device mesh of the cell; with a pipeline, the mesh of this rank's stage.

    Its dimensions, the outermost first; all but ``dp_shard`` are left out where their size is 1:
        pp: Stages of a pipeline. It is cut off: each stage has a mesh of its own.
        dp_replicate: Replicas of the shards; gradients are all-reduced between them (hybrid
            sharding).
        dp_shard: Shards of each parameter. Ranks of context and of expert parallelism are among
            them.
        tp: Parts of a layer under tensor parallelism. Neighbours, since they communicate most.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # Named as the arguments of accelerate's ParallelismConfig: ``{"dp_replicate_size": 2,
    # "dp_shard_size": 2}``, the outermost dimension first; empty for a mesh of one dimension.
    size_by_name = parallelism(cell)
    if not size_by_name:
        size_by_name = {"dp_shard_size": cell.world_size // cell.pp}
    names = tuple(name.removesuffix("_size") for name in size_by_name)
    sizes = tuple(size_by_name.values())
    if cell.pp == 1:
        return init_device_mesh(device.type, sizes, mesh_dim_names=names)
    all_names = ("pp", *names)
    all_stages = init_device_mesh(device.type, (cell.pp, *sizes), mesh_dim_names=all_names)
    return all_stages[names]


def plugin(version: int, precision: Precision, cell: Cell, wrap: WrapSpec) -> dict[str, Any]:
    """Return keyword arguments for Accelerator: an FSDP plugin of that version.

    It wraps the model's blocks one by one, or whatever is large enough.

    Args:
        version: 1 or 2.
        precision: The cell's dtypes.
        cell: The cell.
        wrap: Which modules are blocks.
    """
    from accelerate import FullyShardedDataParallelPlugin

    settings = {"fsdp_version": version, **_common_settings(cell)}
    if cell.option("wrap_policy") == "size":
        settings |= {"auto_wrap_policy": "size_based_wrap", "min_num_params": wrap.min_num_params}
    else:
        settings |= {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": list(wrap.blocks),
        }
    if wrap.ignored_modules:
        # A regular expression: https://huggingface.co/docs/accelerate/package_reference/fsdp
        names = [re.escape(name) for name in wrap.ignored_modules]
        settings["ignored_modules"] = "|".join(names)
    if cell.option("reduce_dtype") != "auto":
        # Otherwise accelerate makes a policy of its argument ``mixed_precision``.
        settings["mixed_precision_policy"] = policy(version, precision, cell)
    if version == 1:
        settings["use_orig_params"] = bool(cell.option("use_orig_params"))
        # Synchronising module states needs a GPU; the ranks start from the same seed anyway.
        settings["sync_module_states"] = False
        settings["reshard_after_forward"] = _sharding_strategy(cell)
    settings = cell.with_settings("FullyShardedDataParallelPlugin", settings)
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**settings), **_parallelism_config(cell)}


def _common_settings(cell: Cell) -> dict[str, Any]:
    """Return the settings that accelerate's plugin and TrainingArguments name alike."""
    return {
        "state_dict_type": STATE_DICT_TYPES[str(cell.option("state_dict"))],
        "cpu_ram_efficient_loading": bool(cell.option("cpu_ram_efficient_loading")),
        "cpu_offload": bool(cell.option("cpu_offload")),
        # Option values are False, True or a text. They have no setting for ``reentrant`` (a
        # backward pass of its own for each block): there the driver turns it on in the model.
        "activation_checkpointing": cell.option("activation_checkpointing") is True,
        "reshard_after_forward": bool(cell.option("reshard_after_forward")),
    }


def _sharding_strategy(cell: Cell) -> str:
    """Return the name of FSDP1's ShardingStrategy that the cell asks for."""
    if cell.option("reshard_after_forward"):
        return "FULL_SHARD"
    return "SHARD_GRAD_OP"


def _parallelism_config(cell: Cell) -> dict[str, Any]:
    """Return the argument for a mesh of several dimensions; empty for one dimension.

    It is for replicas of shards (hybrid sharding) and tensor parallelism, which accelerate and
    Trainer have for FSDP2 alone.
    """
    # https://huggingface.co/docs/accelerate/concept_guides/nd_parallelism
    sizes = parallelism(cell)
    if not sizes:
        return {}
    from accelerate import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(**sizes)}


def arguments(version: int, precision: Precision, cell: Cell, wrap: WrapSpec) -> dict[str, Any]:
    """Return keyword arguments for TrainingArguments: ``fsdp=True`` and an ``fsdp_config``.

    https://huggingface.co/docs/transformers/fsdp

    Args:
        version: 1 or 2.
        precision: The cell's dtypes.
        cell: The cell.
        wrap: Which modules are blocks.
    """
    if cell.tp * cell.ep > 1:
        # Tensor or expert parallelism: transformers shards the model while it loads it
        # (``mesh.distributed_config``), by FSDP2 too. Trainer takes the sizes of the mesh from the
        # model, and needs no argument.
        return {}
    settings = {
        "version": version,
        **_common_settings(cell),
        # Synchronising module states needs a GPU; the ranks start from the same seed anyway. FSDP2
        # has no such setting, yet transformers 4 synchronises by default.
        "sync_module_states": False,
    }
    if cell.option("wrap_policy") == "size":
        settings |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": wrap.min_num_params}
    elif wrap.blocks:
        settings |= {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": list(wrap.blocks),
        }
    else:
        # Trainer takes an empty list for a class without a name.
        settings["auto_wrap_policy"] = "NO_WRAP"
    if version == 1:
        settings["use_orig_params"] = bool(cell.option("use_orig_params"))
        settings["reshard_after_forward"] = _sharding_strategy(cell).lower()
    return {
        "fsdp": True,
        "fsdp_config": cell.with_settings("fsdp_config", settings),
        **_parallelism_config(cell),
    }
