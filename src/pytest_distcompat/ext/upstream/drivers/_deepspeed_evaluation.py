"""Engines of DeepSpeed that evaluate and never train: they have no optimizer.

Reference and reward models, whose outputs another training uses, run in such engines. Each is made
around a tiny model, computes it on some rows and is destroyed, as users do once its training has
ended. https://deepspeed.readthedocs.io/en/latest/initialize.html

``DeepSpeedDriver.metrics`` returns the results, which the check ``evaluation`` compares with those
of one process.
"""

from __future__ import annotations

from typing import Any

#: ZeRO's stages that need no optimizer.
STAGES = (0, 3)
#: The names of the dtypes, as torch has them.
DTYPES = ("float32", "bfloat16")


def metrics(count: int, backend: str, device: str = "cpu") -> dict[str, float]:
    """Return the mean of each engine's outputs: ``{"without an optimizer, zero3, float32": 0.3}``.

    All ranks compute on the same rows.

    Args:
        count: The number of rows.
        backend: Of the process group: ``gloo`` or ``nccl``.
        device: ``cpu`` or that of this rank.
    """
    from pytest_distcompat.launch.deepspeed_cpu import init_distributed

    init_distributed(backend)
    means: dict[str, float] = {}
    for stage in STAGES:
        for dtype in DTYPES:
            name = f"without an optimizer, zero{stage}, {dtype}"
            means[name] = _mean_of_outputs(count, stage, dtype, device)
    return means


def _mean_of_outputs(count: int, stage: int, dtype: str, device: str) -> float:
    """Return the mean of what an engine computes, and destroy the engine."""
    import deepspeed
    import torch

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0.125)
    torch.nn.init.constant_(model.bias, 0.25)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    rows = torch.arange(count, dtype=getattr(torch, dtype), device=device).unsqueeze(1)
    with torch.no_grad():
        outputs = engine(rows)
    engine.destroy()
    return float(outputs.double().mean())
