"""Architectures of transformers as tiny models: their ids, the cells of the profile ``zoo``, and that they can be made."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import suite
from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.ext.upstream.models import (
    BLANK,
    BLANK_TASKS,
    architecture,
    architectures,
    of_tasks,
)
from pytest_distcompat.ext.upstream.zoo import ZOO_CHECKS
from pytest_distcompat.models import TinyModel, model_of
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.profiles import cells, left_out
from pytest_distcompat.scenario import STEPS as STEPS_OF_A_TRAINING
from pytest_distcompat.world import World


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
    cells_of_zoo = cells("zoo", suite.TestAccelerate.matrix, driver=driver, names=((), ()), world_size=2, device="cpu")
    strategies = ("ddp", "fsdp2", "zero3")
    assert {cell.strategy for cell in cells_of_zoo} <= set(strategies)
    chosen = cells(
        "zoo", suite.TestAccelerate.matrix, driver=driver, names=(strategies, ("fp32",)), world_size=2, device="cpu"
    )
    assert len(chosen) == 3 * len(architectures())
    assert Cell.of("zero3", "fp32", model="hf:FSMTForConditionalGeneration") in chosen
    assert list(left_out("zoo", {chosen[0]: (*ZOO_CHECKS, "memory")})) == [(chosen[0], "memory")]


def test_each_task_of_transformers_has_a_class_or_a_reason() -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    tables = {
        name.removeprefix("MODEL_FOR_").removesuffix("_NAMES").removesuffix("_MAPPING").lower(): set(table)
        for name, table in vars(auto).items()
        if name.startswith("MODEL_FOR_") and name.endswith("_NAMES")
    }
    chosen = of_tasks()
    assert {*chosen, "causal_lm"} == tables.keys()
    assert {task for task, kind in chosen.items() if not kind} == BLANK_TASKS.keys()
    types = {name for table in tables.values() for name in table}
    assert types >= {"t5", "blip-2"}
    assert {f"hf:{kind}" for kind in chosen.values() if kind} <= set(architectures())
    assert len(set(chosen.values()) - {""}) > 30


def test_a_class_names_its_task_where_the_model_type_has_several() -> None:
    driver = DRIVERS.get("torch")
    assert driver.unsupported_reason(Cell.of("ddp", "fp32", model="hf:BertForTokenClassification")) is None
    reason = driver.unsupported_reason(Cell.of("ddp", "fp32", model="hf:DetrForSegmentation"))
    assert "timm" in str(reason)


STEPS = ["hf:qwen3", "hf:t5", "hf:distilbert", "hf:vit", "hf:wav2vec2", "hf:BertForTokenClassification"]
#: Own losses of outputs, several frames, boxes, series.
STEPS += [
    f"hf:{kind}"
    for kind in (
        *("YolosForObjectDetection", "TimesformerForVideoClassification", "LayoutLMForQuestionAnswering"),
        *("PatchTSTForRegression", "BertForMultipleChoice", "CLIPModel", "ASTForAudioClassification"),
    )
]


@pytest.mark.parametrize("name", STEPS)
def test_one_of_each_kind_of_input_takes_a_step(name: str) -> None:
    torch = pytest.importorskip("torch")
    tiny = model_of(Cell.of("ddp", "fp32", model=name))
    torch.manual_seed(0)
    model = tiny.make()
    batch = tiny.batch(0, 1)
    assert {len(value) for value in batch.values()} == {2}
    tiny.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    used = [parameter.grad is not None for parameter in model.parameters()]
    assert sum(used) > 0.9 * len(used)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    assert tiny.count(batch) > 0
    assert tiny.outputs(model, batch).isfinite().all()


@pytest.mark.parametrize("name", ["hf:Qwen3ForSequenceClassification", "hf:Qwen3ForTokenClassification"])
def test_a_causal_model_that_classifies_drops_nothing_and_takes_two_rows(name: str) -> None:
    """One head of transformers refuses two rows without a padding token, the other drops activations by default."""
    torch = pytest.importorskip("torch")
    tiny = model_of(Cell.of("ddp", "fp32", model=name))
    torch.manual_seed(0)
    model = tiny.make().train()
    batch = tiny.batch(0, 0)
    assert {len(value) for value in batch.values()} == {2}
    assert torch.equal(tiny.loss(model, batch), tiny.loss(model, batch))


@pytest.mark.parametrize("name", ["hf:qwen3", "hf:BertForTokenClassification", "hf:ConvNextBackbone"])
def test_the_reference_decays_what_trainer_decays(tmp_path: Path, name: str) -> None:
    """BERT's norms are named LayerNorm."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    driver: Any = DRIVERS.get("trainer")(Cell.of("ddp", "fp32", model=name), World(0, 1, 0, "cpu"))
    model = driver.tiny.make()
    arguments = transformers.TrainingArguments(str(tmp_path), weight_decay=0.01, use_cpu=True, report_to="none")
    own = transformers.Trainer(model=model, args=arguments).create_optimizer().param_groups
    for group, expected in zip(driver.groups(model), own, strict=True):
        assert {id(parameter) for parameter in group["params"]} == {id(parameter) for parameter in expected["params"]}
        assert group["weight_decay"] == expected["weight_decay"]


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name, reason in BLANK.items() if not name.islower() and "rounding" not in reason]
)
def test_a_class_without_a_model_has_none_still(name: str) -> None:
    pytest.importorskip("torch")
    invalid = pytest.importorskip("huggingface_hub.errors").StrictDataclassError
    # Also one that this release of transformers has not yet.
    with pytest.raises(
        (AttributeError, ImportError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError, invalid)
    ):
        _train_most(architecture(f"hf:{name}"))


def _train_most(tiny: TinyModel) -> None:
    """Take a step, and raise if it leaves most parameters without a gradient."""
    model = tiny.make()
    tiny.loss(model, tiny.batch(0, 0)).backward()  # type: ignore[no-untyped-call]
    trained = [parameter.grad is not None for parameter in model.parameters()]
    if sum(trained) < len(trained) / 2:
        raise RuntimeError("most parameters have no gradient")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model", [architecture for architecture in architectures() if architecture.removeprefix("hf:") not in BLANK]
)
def test_no_model_of_the_zoo_turns_on_rounding(model: str) -> None:
    pytest.importorskip("torch")
    assert _drift(model.removeprefix("hf:")) <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, reason in BLANK.items() if "rounding" in reason])
def test_a_class_that_turns_on_rounding_still_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.delitem(BLANK, name)
    assert _drift(name) > 1


def _drift(name: str) -> float:
    """Return how far one bit of its gradients moves losses and norms of a training, 1 being the tolerance.

    Gradients are what ranks add up in another order. One bit of the parameters would say nothing: it moves qwen3 by 4.
    """
    precision = PRECISIONS.get("fp32")
    model = architecture(f"hf:{name}")
    tolerances = precision.loss_tolerance, precision.norm_tolerance * model.norm_spread
    moved = [0.0]
    # Which parameters decay differs.
    for driver in ("torch", "trainer"):
        first, *others = (_trained(name, draw, driver) for draw in range(4))
        if not all(norm for _, norm in first):
            return math.inf
        moved += [
            abs(value - other_value) / abs(value) / tolerance
            for numbers in others
            for step, other_step in zip(first, numbers, strict=True)
            for value, other_value, tolerance in zip(step, other_step, tolerances, strict=True)
        ]
    return max(moved)


def _trained(name: str, draw: int, driver_name: str) -> list[tuple[float, float]]:
    """Return the losses and gradient norms of 20 steps of the reference; but for draw 0 each gradient is rounded otherwise."""
    import torch

    # As in ranks; threads of several xdist workers would wait for one another.
    torch.set_num_threads(1)
    driver: Any = DRIVERS.get(driver_name)(Cell.of("ddp", "fp32", model=f"hf:{name}"), World(0, 1, 0, "cpu"))
    model = driver.build_model()
    generator = torch.Generator().manual_seed(draw)

    def round_otherwise(gradient: Any) -> Any:
        return gradient * (1 + torch.finfo(gradient.dtype).eps * torch.randn(gradient.shape, generator=generator) / 2)

    for parameter in model.parameters() if draw else ():
        if parameter.requires_grad:
            parameter.register_hook(round_otherwise)
    return [(driver.reference(model, step, 2), driver.grad_norm) for step in range(STEPS_OF_A_TRAINING)]
