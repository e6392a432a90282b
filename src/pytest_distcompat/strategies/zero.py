"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) partitioned over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.strategies._base import Dtypes, Strategy

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision


def _dtypes(precision: Precision) -> Dtypes:
    """Parameters live and travel in the compute dtype; the flat partitions that are optimized in the master's.

    https://huggingface.co/blog/deepspeed-to-fsdp-and-back: DeepSpeed always keeps float32 masters. Since 0.18 it has a
    low-precision mode too (``bf16_master_weights_and_grads``), which is what bf16_pure asks for.
    """
    master, compute = precision.master, precision.compute
    return Dtypes(storage=compute, compute=compute, reduce=compute, gradient=master, master=master, state=master)


#: What the drivers clip gradients to; DeepSpeed clips by itself.
MAX_NORM = 1.0


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
    if cell.option("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    written: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": cell.option("accumulate"),
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "bf16": bf16,
        "zero_allow_untested_optimizer": True,
        # With offload DeepSpeed would compile its own Adam.
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision.compute == "float16" or cell.option("conflict"):
        written["fp16"] = {"enabled": True, "initial_scale_power": 10}
    if cell.option("conflict"):
        written["bf16"] = {"enabled": False}
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


def _zero(stage: int, splits: str) -> Strategy:
    return Strategy(
        f"zero{stage}",
        meaning=f"DeepSpeed ZeRO stage {stage}: {splits} partitioned",
        dtypes=_dtypes,
        wrapper="DeepSpeedEngine",
        kind="ZeRO-3" if stage == 3 else "Tensor",
        shards=stage == 3,
        leading=("module",),
        zero_stage=stage,
        flat_masters=True,
        accelerate=functools.partial(_accelerate, stage),
        options={
            "state_dict_full": "DeepSpeed writes its own sharded form; state_dict is an option of FSDP",
            "compile_regional": "DeepSpeed compiles the whole engine",
            "compile_partial": "DeepSpeed compiles the whole engine",
            **dict.fromkeys(
                ("no_reshard_after_forward", "no_use_orig_params", "cpu_ram_efficient_loading", "wrap_size", "ignored"),
                "it is an option of FSDP",
            ),
            **({} if stage == 3 else {"meta_init": f"ZeRO-{stage} keeps whole parameters on every rank"}),
        },
        order=2 + stage,
    )


ZERO1 = _zero(1, "optimizer state")
ZERO2 = _zero(2, "optimizer state and gradients")
ZERO3 = _zero(3, "optimizer state, gradients and parameters")
