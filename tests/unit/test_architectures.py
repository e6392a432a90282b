"""Architectures of transformers as tiny models: their ids, the cells of the profile ``zoo``, and that they can be made."""

from __future__ import annotations

import pytest

from pytest_distcompat import suite
from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.models import architecture, architectures, model_of
from pytest_distcompat.profiles import ZOO_CHECKS, cells, left_out


def test_an_id_names_the_architecture() -> None:
    cell = Cell.of("fsdp2", "fp32", model="hf:xlm_roberta")
    assert cell.id == "fsdp2-fp32-w2-model_hf:xlm_roberta"
    assert Cell.parse(cell.id) == cell
    with pytest.raises(ValueError, match="unknown part 'model_zf:llama'"):
        Cell.parse("fsdp2-fp32-w2-model_zf:llama")


def test_an_architecture_that_cannot_be_built_has_a_reason() -> None:
    driver = DRIVERS.get("torch")
    assert "hf:nonsense" not in architectures()
    assert "no such model type" in str(driver.unsupported_reason(Cell.of("ddp", "fp32", model="hf:nonsense")))
    assert "timm" in str(driver.unsupported_reason(Cell.of("ddp", "fp32", model="hf:gemma3n")))
    assert driver.unsupported_reason(Cell.of("ddp", "fp32", model="hf:qwen3")) is None


def test_the_zoo_has_every_causal_model_three_times() -> None:
    driver = DRIVERS.get("accelerate")
    found = cells("zoo", suite.TestAccelerate.matrix, driver=driver, names=((), ()), world_size=2, device="cpu")
    strategies = ("ddp", "fsdp2", "zero3")
    assert {cell.strategy for cell in found} <= set(strategies)
    chosen = cells(
        "zoo", suite.TestAccelerate.matrix, driver=driver, names=(strategies, ("fp32",)), world_size=2, device="cpu"
    )
    assert len(chosen) == 3 * len(architectures())
    assert Cell.of("zero3", "fp32", model="hf:t5") in chosen
    assert list(left_out("zoo", {chosen[0]: (*ZOO_CHECKS, "memory")})) == [(chosen[0], "memory")]


@pytest.mark.parametrize("name", ["hf:qwen3", "hf:t5", "hf:distilbert", "hf:vit", "hf:wav2vec2"])
def test_one_of_each_task_takes_a_step(name: str) -> None:
    torch = pytest.importorskip("torch")
    tiny = model_of(Cell.of("ddp", "fp32", model=name))
    torch.manual_seed(0)
    model, batch = tiny.make(), tiny.batch(0, 1)
    tiny.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    assert tiny.count(batch) > 0
    assert tiny.outputs(model, batch).isfinite().all()


@pytest.mark.nightly
def test_each_architecture_takes_a_step_or_has_a_reason() -> None:
    pytest.importorskip("torch")
    made = [tiny for tiny in map(architecture, architectures()) if not tiny.unsupported_reason]
    failed = {}
    for tiny in made:
        try:
            tiny.loss(tiny.make(), tiny.batch(0, 0)).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            failed[tiny.name] = f"{type(error).__name__}: {error}"
    assert not failed
    assert len(made) >= 150
