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


def config(stage: int, precision: Precision, micro_batch: int = 2) -> dict[str, Any]:
    """The DeepSpeed JSON: one micro-batch a step, torch's own AdamW (no op to compile)."""
    bf16: dict[str, Any] = {"enabled": precision.compute == "bfloat16"}
    if precision.master == "bfloat16":
        # With the first key alone DeepSpeed asks for offload; both together are its low-precision mode.
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        # By default stage 3 keeps parameters of less than 100 thousand elements whole: all of a tiny model.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": bf16,
        "zero_allow_untested_optimizer": True,
    }


def _accelerate(stage: int, precision: Precision, cell: Cell) -> Mapping[str, Any]:
    import deepspeed  # noqa: F401 - so that there is something to switch off
    from accelerate import DeepSpeedPlugin

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory

    without_shared_memory()
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config(stage, precision))}


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
        options={"state_dict_full": "DeepSpeed writes its own sharded form; state_dict is an option of FSDP"},
        order=2 + stage,
    )


ZERO1 = _zero(1, "optimizer state")
ZERO2 = _zero(2, "optimizer state and gradients")
ZERO3 = _zero(3, "optimizer state, gradients and parameters")
