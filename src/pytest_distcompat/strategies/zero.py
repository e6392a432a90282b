"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) partitioned over the ranks; nothing (0)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.strategies._base import MAX_NORM, Dtypes, Strategy

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _dtypes(precision: Precision) -> Dtypes:
    """Parameters live and travel in the compute dtype; what is optimized, flat partitions or copies, is in the master's.

    https://huggingface.co/blog/deepspeed-to-fsdp-and-back: DeepSpeed always keeps float32 masters. Since 0.18 it has a
    low-precision mode too (``bf16_master_weights_and_grads``), which is what bf16_pure asks for.
    """
    master, compute = precision.master, precision.compute
    return Dtypes(storage=compute, compute=compute, reduce=compute, gradient=master, master=master, state=master)


def config(stage: int, precision: Precision, cell: Cell, micro_batch: int = 2) -> dict[str, Any]:
    """The DeepSpeed JSON, for torch's own AdamW (no op to compile)."""
    bf16: dict[str, Any] = {"enabled": precision.compute == "bfloat16"}
    if precision.master == "bfloat16":
        # With the first key alone DeepSpeed asks for offload; both together are its low-precision mode.
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    zero: dict[str, Any] = {
        "stage": stage,
        # By default stage 3 keeps parameters of less than 100 thousand elements whole: all of a tiny model.
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if cell.option("cpu_offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    written: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": cell.option("grad_accum"),
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "bf16": bf16,
        "zero_allow_untested_optimizer": True,
        # With offload DeepSpeed would compile its own Adam.
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision.compute == "float16" or cell.option("conflict"):
        # By default DeepSpeed lets the first overflow pass without a smaller scale.
        written["fp16"] = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    if cell.option("grad_accum_dtype") != "auto":
        written["data_types"] = {"grad_accum_dtype": cell.option("grad_accum_dtype")}
    if cell.option("reduce_dtype") != "auto":
        written["communication_data_type"] = cell.option("reduce_dtype")
    if cell.option("conflict"):
        written["bf16"] = {"enabled": False}
    return written


def _native(stage: int, precision: Precision, cell: Cell) -> Mapping[str, Any]:
    """The JSON is all that DeepSpeed is told, so a contradiction must stand in it: two precisions at once."""
    written = config(stage, precision, cell)
    written["bf16"]["enabled"] = precision.compute == "bfloat16"
    return written


def _accelerate(stage: int, precision: Precision, cell: Cell) -> Mapping[str, Any]:
    import deepspeed  # noqa: F401 - so that there is something to switch off
    from accelerate import DeepSpeedPlugin

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory

    without_shared_memory()
    settings = config(stage, precision, cell)
    # As accelerate's documentation has it: the Accelerator's own count is to be filled in.
    settings["gradient_accumulation_steps"] = "auto"
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=settings)}


def _transformers(stage: int, precision: Precision, cell: Cell) -> Mapping[str, Any]:
    """https://huggingface.co/docs/transformers/deepspeed: what TrainingArguments say too is left to them."""
    import deepspeed  # noqa: F401 - so that there is something to switch off

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory

    without_shared_memory()
    settings = config(stage, precision, cell)
    shared = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {"deepspeed": settings | dict.fromkeys(shared, "auto")}


#: What an option of FSDP, or of what cuts a model into pieces, has to do with an engine: nothing.
_NOT_OURS = {
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


def _zero(stage: int, meaning: str, options: Mapping[str, str]) -> Strategy:
    return Strategy(
        f"zero{stage}",
        meaning=f"DeepSpeed ZeRO stage {stage}: {meaning}",
        dtypes=_dtypes,
        wrapper="DeepSpeedEngine",
        kind="ZeRO-3" if stage == 3 else "Tensor",
        shards=stage == 3,
        leading=("module",),
        zero_stage=stage,
        # Without ZeRO the masters of low precision are copies one by one, which the probe takes for the parameters.
        flat_masters=stage > 0,
        # Gradients are partitioned from stage 2 on, and the engine refuses no_sync().
        reduces_each_micro_batch=stage >= 2,
        accelerate=functools.partial(_accelerate, stage),
        transformers=functools.partial(_transformers, stage),
        deepspeed=functools.partial(_native, stage),
        options={**_NOT_OURS, **options},
        order=3 + stage,
    )


def _whole(stage: int) -> dict[str, str]:
    return {"meta_init": f"ZeRO-{stage} keeps whole parameters on every rank"}


ZERO0 = _zero(
    0,
    "nothing partitioned, plain data parallel",
    _whole(0)
    | {
        "cpu_offload": "without ZeRO DeepSpeed offloads nothing",
        "grad_accum_dtype_fp32": "without ZeRO DeepSpeed refuses to add gradients up in another dtype than the parameters'",
    },
)
ZERO1 = _zero(1, "optimizer state partitioned", _whole(1))
ZERO2 = _zero(2, "optimizer state and gradients partitioned", _whole(2))
ZERO3 = _zero(3, "optimizer state, gradients and parameters partitioned", {})
