"""The strategies ``zero0`` to ``zero3``: DeepSpeed ZeRO, whose stages partition more and more.

Stage 1 partitions optimizer state, 2 gradients too, 3 parameters too; stage 0 partitions nothing.

DeepSpeed is configured by JSON. ``config`` makes it for a cell, one configuration under test:
``zero2-bf16_upcast-w2`` becomes ``{"zero_optimization": {"stage": 2, ...}, "bf16": {"enabled":
True}, ...}``. The *backend configs* ``_native``, ``_accelerate`` and ``_transformers`` add what
their library wants; drivers, the classes by which trainers are tested, call them on each rank. The
settings of a cell, as ``ds_config.zero_optimization.overlap_comm=false`` in its option ``set``,
override keys of the JSON. *Masters* are the float32 copies of weights that the optimizer updates.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.parallel import tensor_parallel
from pytest_distcompat.strategies._base import MAX_NORM, Dtypes, Strategy, WrapSpec

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _dtypes(precision: Precision) -> Dtypes:
    """Return the dtypes of ZeRO: its row in the documentation's table of strategies.

    Parameters and reductions are in the compute dtype, masters and state in the master dtype.
    """
    # DeepSpeed always keeps float32 masters
    # (https://huggingface.co/blog/deepspeed-to-fsdp-and-back). Since 0.18 it has a low-precision
    # mode too (``bf16_master_weights_and_grads``), which is what bf16_pure asks for.
    master, compute = precision.master, precision.compute
    return Dtypes(
        storage=compute,
        compute=compute,
        reduce=compute,
        gradient=master,
        master=master,
        state=master,
    )


def config(stage: int, precision: Precision, cell: Cell) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a cell, without an optimizer: torch's AdamW is passed instead.

    DeepSpeed's own Adam would be compiled first.

    Args:
        stage: 0 to 3.
        precision: The cell's dtypes.
        cell: The cell.
    """
    bf16: dict[str, Any] = {"enabled": precision.compute == "bfloat16"}
    if precision.master == "bfloat16":
        # With the first key alone DeepSpeed asks for offload; both together are its low-precision
        # mode.
        bf16["bf16_master_weights_and_grads"] = True
        bf16["bf16_optimizer_states"] = True
    zero: dict[str, Any] = {
        "stage": stage,
        # By default stage 3 keeps parameters of less than 100 thousand elements whole: all of a
        # tiny model.
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if cell.option("cpu_offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": cell.option("grad_accum"),
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "bf16": bf16,
        "zero_allow_untested_optimizer": True,
        # With offload DeepSpeed would compile its own Adam.
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision.compute == "float16" or cell.option("conflict"):
        # With DeepSpeed's default hysteresis the first overflow does not lower the scale.
        settings["fp16"] = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    if cell.option("grad_accum_dtype") != "auto":
        settings["data_types"] = {"grad_accum_dtype": cell.option("grad_accum_dtype")}
    if cell.option("reduce_dtype") != "auto":
        settings["communication_data_type"] = cell.option("reduce_dtype")
    if cell.option("conflict"):
        # The JSON asks for float16, where the trainer asks for bfloat16.
        settings["bf16"] = {"enabled": False}
    if cell.own_disks:
        # Each machine saves its part of a checkpoint on a disk that no other one sees.
        # https://www.deepspeed.ai/docs/config-json/#checkpoint-options
        settings["checkpoint"] = {"use_node_local_storage": True}
    if cell.cp > 1:
        settings["sequence_parallel_size"] = cell.cp
    if cell.tp > 1:
        # https://www.deepspeed.ai/tutorials/autotp-training
        plan = tensor_parallel.autotp_plan(cell)
        settings["tensor_parallel"] = {"autotp_size": cell.tp, **plan}
    return settings


def _native(stage: int, precision: Precision, cell: Cell) -> Mapping[str, Any]:
    """Return the JSON for DeepSpeed's own API, whose only configuration it is.

    So under option ``conflict`` the JSON contradicts itself: it asks for float16 and bfloat16.
    """
    settings = config(stage, precision, cell)
    # ``config`` has disabled it under option ``conflict``.
    settings["bf16"]["enabled"] = precision.compute == "bfloat16"
    return cell.with_settings("ds_config", settings)


def _accelerate(stage: int, precision: Precision, cell: Cell, wrap: WrapSpec) -> Mapping[str, Any]:
    """Return keyword arguments for Accelerator: a DeepSpeed plugin with the JSON."""
    import deepspeed  # noqa: F401 - without_shared_memory patches it
    from accelerate import DeepSpeedPlugin

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory

    without_shared_memory()
    settings = config(stage, precision, cell)
    # At "auto" accelerate fills in the Accelerator's own count, as its documentation says.
    settings["gradient_accumulation_steps"] = "auto"
    if "gradient_clipping" in cell.settings("DeepSpeedPlugin"):
        # The plugin's own argument replaces nothing but "auto".
        settings["gradient_clipping"] = "auto"
    settings = cell.with_settings("ds_config", settings)
    arguments = cell.with_settings("DeepSpeedPlugin", {"hf_ds_config": settings})
    plugin = DeepSpeedPlugin(**arguments)
    return {"deepspeed_plugin": plugin, **_sequence_parallel(cell)}


def _sequence_parallel(cell: Cell) -> dict[str, Any]:
    """Return DeepSpeed's Ulysses for accelerate and Trainer, which name it ``sp_size``."""
    # https://huggingface.co/docs/accelerate/concept_guides/sequence_parallelism
    if cell.cp == 1:
        return {}
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    return {
        "parallelism_config": ParallelismConfig(
            sp_size=cell.cp, dp_shard_size=cell.dp_size, sp_handler=handler
        )
    }


def _transformers(
    stage: int, precision: Precision, cell: Cell, wrap: WrapSpec
) -> Mapping[str, Any]:
    """Return the JSON, "auto" for what TrainingArguments set: https://huggingface.co/docs/transformers/deepspeed."""
    import deepspeed  # noqa: F401 - without_shared_memory patches it

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory

    without_shared_memory()
    settings = config(stage, precision, cell)
    set_by_arguments = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    settings |= dict.fromkeys(set_by_arguments, "auto")
    return {"deepspeed": cell.with_settings("ds_config", settings), **_sequence_parallel(cell)}


#: Options of FSDP and of compilation by block -> why a DeepSpeed engine does not have them.
_UNSUPPORTED = {
    "state_dict_full": "DeepSpeed writes its own sharded form; state_dict is an option of FSDP",
    "compile_regional": "DeepSpeed compiles the whole engine",
    "compile_partial": "DeepSpeed compiles the whole engine",
    **dict.fromkeys(
        (
            "no_reshard_after_forward",
            "dp_replicate_2",
            "no_use_orig_params",
            "cpu_ram_efficient_loading",
            "wrap_policy_size",
            "ignored_modules",
        ),
        "it is an option of FSDP",
    ),
}

#: Models whose ranks use different parameters in a step -> why no stage that partitions state
#: trains them.
_PARTITIONED = dict.fromkeys(
    ("model_branch", "model_hf:longcat_flash"),
    "all ranks must use the same parameters (https://github.com/deepspeedai/DeepSpeed/issues/1355)",
)


def _zero(stage: int, meaning: str, options: dict[str, str]) -> Strategy:
    """Return the strategy of a stage.

    Args:
        stage: 0 to 3.
        meaning: What it partitions, for the documentation.
        options: Option of a cell as its id spells it -> why this stage does not have it.
    """
    if stage > 0:
        options = _PARTITIONED | options
    return Strategy(
        f"zero{stage}",
        meaning=f"DeepSpeed ZeRO stage {stage}: {meaning}",
        dtypes=_dtypes,
        wrapper="DeepSpeedEngine",
        kind="ZeRO-3" if stage == 3 else "Tensor",
        shards=stage == 3,
        leading=("module",),
        zero_stage=stage,
        # Without ZeRO there is one master for each parameter, and no partition.
        flat_masters=stage > 0,
        # Gradients are partitioned from stage 2 on, and the engine raises in no_sync().
        reduces_each_micro_batch=stage >= 2,
        accelerate=functools.partial(_accelerate, stage),
        transformers=functools.partial(_transformers, stage),
        deepspeed=functools.partial(_native, stage),
        options=_UNSUPPORTED | options,
        order=3 + stage,
    )


def _no_meta_init(stage: int) -> dict[str, str]:
    """Return why a stage below 3 does not have option ``meta_init``, for ``_zero``."""
    return {"meta_init": f"ZeRO-{stage} keeps whole parameters on every rank"}


ZERO0 = _zero(
    0,
    "nothing partitioned, plain data parallel",
    _no_meta_init(0) | {"cpu_offload": "without ZeRO DeepSpeed offloads nothing"},
)
ZERO1 = _zero(1, "optimizer state partitioned", _no_meta_init(1))
ZERO2 = _zero(2, "optimizer state and gradients partitioned", _no_meta_init(2))
ZERO3 = _zero(
    3,
    "optimizer state, gradients and parameters partitioned",
    # "MiCS ZeRO-3 sharding has been removed", says DeepSpeed:
    # https://github.com/deepspeedai/DeepSpeed/issues/8489.
    {"dp_replicate_2": "copies of shards were DeepSpeed's MiCS, which it removed in 0.19.8"},
)
