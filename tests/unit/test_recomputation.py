"""Re-entrant recomputation: the cells that have it, and the arguments that the libraries are given."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import find_driver, unsupported_reason
from pytest_distcompat.ext.upstream.drivers._options import recomputation

REENTRANT = "activation_checkpointing_reentrant"
DEEPSPEED = "activation_checkpointing_deepspeed"


@pytest.mark.parametrize(
    ("cell", "arguments"),
    [
        ("ddp-fp32-w2-activation_checkpointing", {"use_reentrant": False}),
        (f"ddp-fp32-w2-{REENTRANT}", {"use_reentrant": True}),
        (
            f"ddp-fp32-w2-{REENTRANT}-set_checkpoint.preserve_rng_state=false",
            {"use_reentrant": True, "preserve_rng_state": False},
        ),
        ("ddp-fp32-w2-activation_checkpointing-set_checkpoint.use_reentrant=true", {"use_reentrant": True}),
    ],
)
def test_the_arguments(cell: str, arguments: dict[str, Any]) -> None:
    assert recomputation(Cell.parse(cell)) == arguments


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        ("torch", f"fsdp2-fp32-w2-{REENTRANT}", None),
        ("trainer", f"fsdp2-fp32-w2-{REENTRANT}", None),
        ("trainer", f"fsdp2-fp32-w2-model_mlp-{REENTRANT}", "no gradient_checkpointing_enable()"),
        ("trainer", "fsdp2-fp32-w2-model_mlp-activation_checkpointing", None),
        ("torch", f"fsdp2-fp32-w2-compile_aot_eager-{REENTRANT}", "makes no graph"),
        ("torch", f"fsdp2-fp32-w2-model_twice-{REENTRANT}", "each use of a block"),
        ("torch", f"ddp-fp32-w2-{REENTRANT}-frozen", "behind a frozen part"),
        ("accelerate", f"zero3-fp32-w2-{REENTRANT}-frozen", None),
        ("torch", f"fsdp2-fp32-w2-{REENTRANT}-pp_2", "autograd.grad"),
        ("deepspeed", f"zero3-fp32-w2-{DEEPSPEED}", None),
        ("accelerate", f"zero3-fp32-w2-{DEEPSPEED}", "driven by the deepspeed driver alone"),
        ("deepspeed", f"zero2-fp32-w2-compile_aot_eager-model_mlp-{DEEPSPEED}", "makes no graph"),
        ("deepspeed", f"zero2-fp32-w2-{DEEPSPEED}-frozen", "behind a frozen part"),
        ("deepspeed", f"zero2-fp32-w2-{DEEPSPEED}-lora", "behind a frozen part"),
    ],
)
def test_the_cells(driver: str, cell: str, reason: str | None) -> None:
    actual_reason = unsupported_reason(find_driver(driver), Cell.parse(cell), "cpu")
    if reason is None:
        assert actual_reason is None
    else:
        assert actual_reason is not None
        assert reason in actual_reason
