"""Option ``loaded``: which cells have a model that the trainer makes itself, and what it is compared with."""

from __future__ import annotations

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import find_driver, unsupported_reason
from pytest_distcompat.ext.upstream.drivers._loaded import changes_values, fill
from pytest_distcompat.scenario import REFERENCE_RUN


@pytest.mark.parametrize(
    ("driver", "cell"),
    [
        ("deepspeed", "zero3-fp32-w2-loaded_from_pretrained"),
        ("deepspeed", "zero3-fp32-w2-model_mlp-loaded_zero_init"),
        ("accelerate", "fsdp2-fp32-w2-cpu_ram_efficient_loading-loaded_from_pretrained"),
        ("accelerate", "zero3-fp32-w2-loaded_from_pretrained-lora"),
        ("trainer", "zero3-bf16_upcast-w2-loaded_from_config"),
    ],
)
def test_cells_that_can_run(driver: str, cell: str) -> None:
    assert unsupported_reason(find_driver(driver), Cell.parse(cell), "cpu") is None


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        ("deepspeed", "zero2-fp32-w2-model_mlp-loaded_zero_init", "ZeRO-3 alone"),
        ("deepspeed", "zero3-fp32-w2-loaded_zero_init", "by itself"),
        ("deepspeed", "zero3-fp32-w2-model_mlp-loaded_from_pretrained", "mlp is not one"),
        ("deepspeed", "zero3-fp32-w2-meta_init-loaded_from_config", "both say how the model is made"),
        ("deepspeed", "zero3-fp32-w2-model_llama_dropout-loaded_from_config", "drops activations"),
        ("deepspeed", "zero3-bf16_upcast-w2-loaded_from_config-float32_norms", "has one dtype"),
        ("deepspeed", "zero3-fp32-w2-model_llama_calibrated-loaded_from_config", "no extra state"),
        ("torch", "fsdp2-fp32-w2-loaded_from_pretrained", "loaded"),
    ],
)
def test_cells_that_cannot(driver: str, cell: str, reason: str) -> None:
    actual_reason = unsupported_reason(find_driver(driver), Cell.parse(cell), "cpu")
    assert actual_reason is not None
    assert reason in actual_reason


@pytest.mark.parametrize(
    ("cell", "changes"),
    [
        ("zero3-fp32-w2-loaded_from_pretrained", False),
        ("zero3-fp32-w2-loaded_from_config", False),
        ("zero3-fp32-w2-loaded_from_backbone", True),
        ("zero3-fp32-w2-loaded_from_pretrained-set_from_pretrained.ignore_mismatched_sizes=true", True),
        ("zero3-fp32-w2-loaded_from_pretrained-set_resize_token_embeddings.new_num_tokens=131", True),
    ],
)
def test_what_one_process_reads_is_compared_with_where_it_is_not_in_the_files(cell: str, changes: bool) -> None:
    assert changes_values(Cell.parse(cell)) == changes
    assert REFERENCE_RUN.only is not None
    assert "loaded" in REFERENCE_RUN.only


def test_what_no_random_number_makes_is_left_as_the_library_made_it() -> None:
    torch = pytest.importorskip("torch")
    base = torch.nn.LayerNorm(4)
    base.bias.data = torch.arange(4.0)
    made = torch.nn.LayerNorm(4)
    made.weight.data.fill_(2.0)
    fill(made, base)
    assert made.weight.tolist() == [2.0] * 4
    assert made.bias.tolist() == [0.0, 1.0, 2.0, 3.0]
