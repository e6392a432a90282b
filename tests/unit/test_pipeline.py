"""Stages of a pipeline, and the schedules that run micro-batches through them, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import find_driver, unsupported_reason
from pytest_distcompat.models import model_of
from pytest_distcompat.parallel.pipeline_parallel import Pipeline

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Be the only rank of a process group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_steps_of_fewer_and_again_of_more_micro_batches(alone: None) -> None:
    """The last step of an epoch may have fewer than those before and after it."""
    cell = Cell.parse("ddp-fp32-w1")
    tiny = model_of(cell)
    assert tiny.stages
    pipeline = Pipeline(tiny.stages, cell, torch.device("cpu"))
    model = tiny.make()
    batch = tiny.batch(0, 0)
    first = tiny.loss(model, rows_of(batch, 0, 1)).item()
    second = tiny.loss(model, rows_of(batch, 1, 2)).item()
    mean = (first + second) / 2
    pipeline.connect(pipeline.keep(model), None)
    for rows, expected in ((2, mean), (1, first), (2, mean)):
        micro_batches = rows_of(batch, 0, rows)
        assert pipeline.step(micro_batches, rows) == pytest.approx(expected)


def rows_of(batch: dict[str, torch.Tensor], start: int, end: int) -> dict[str, torch.Tensor]:
    return {name: tensor[start:end] for name, tensor in batch.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_send_tensors_of_the_shape_and_dtype_that_they_are_told(dtype: str) -> None:
    """A rank that receives another dtype than is sent to it reads numbers that mean nothing."""
    tiny = model_of(Cell.parse("ddp-fp32-w1"))
    assert tiny.stages
    model: Any = tiny.make().to(getattr(torch, dtype))
    batch = tiny.batch(0, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        hidden = tiny.stages.forward(model, batch["input_ids"], first=True, last=False)
        logits = tiny.stages.forward(model, hidden, first=False, last=True)
    expected = tiny.stages.shapes(model, batch)
    for tensor, meta in zip((batch["input_ids"], hidden, logits), expected, strict=True):
        assert tensor.shape == meta.shape
        assert tensor.dtype == meta.dtype


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("zero1-fp32-w2-model_layers-pp_2", None),
        ("zero0-fp16_mixed-w4-model_layers_tied-pp_2", None),
        ("zero2-fp32-w2-model_layers-pp_2", "refuses ZeRO-2 and ZeRO-3"),
        ("zero0-bf16_upcast-w2-model_layers-pp_2", "cannot load what it saved"),
        ("zero1-fp32-w2-pp_2", "llama is no run of layers"),
        ("zero1-fp32-w2-model_layers-grad_accum_2-pp_2", "'grad_accum'"),
    ],
)
def test_cells_of_deepspeeds_pipelines(cell: str, reason: str | None) -> None:
    found = unsupported_reason(find_driver("deepspeed"), Cell.parse(cell), "cpu")
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found


@pytest.mark.parametrize("name", ["layers", "layers_tied"])
def test_a_run_of_layers_computes_what_its_model_does(name: str) -> None:
    pytest.importorskip("deepspeed")
    tiny = model_of(Cell.of("zero1", "fp32", model=name))
    assert tiny.layers
    model = tiny.make()
    batch = tiny.batch(0, 0)
    hidden = batch[tiny.layers.inputs]
    specs = tiny.layers.make(model)
    assert len(specs) == tiny.layers.count
    for spec in specs:
        # A tied layer is described, and made of what the model has.
        layer = spec.build() if hasattr(spec, "build") else spec
        forward = getattr(spec, "forward_fn", None)
        hidden = forward(layer, hidden) if forward else layer(hidden)
    assert torch.equal(hidden, tiny.outputs(model, batch))
    assert torch.equal(tiny.layers.loss(hidden, batch["labels"]), tiny.loss(model, batch))
