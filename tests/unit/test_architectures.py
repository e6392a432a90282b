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
    UNSUPPORTED,
    UNSUPPORTED_TASKS,
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
    assert "hf:nonsense" not in architectures()
    assert "no such model type" in str(unsupported_reason("hf:nonsense"))
    assert "timm" in str(unsupported_reason("hf:gemma3n"))
    assert unsupported_reason("hf:qwen3") is None


def unsupported_reason(model: str) -> str | None:
    """Return why the driver of plain torch cannot train that model."""
    cell = Cell.of("ddp", "fp32", model=model)
    return DRIVERS.get("torch").unsupported_reason(cell)


def test_the_zoo_has_every_causal_model_three_times() -> None:
    strategies = ("ddp", "fsdp2", "zero3")
    for cell in cells_of_zoo((), ()):
        assert cell.strategy in strategies
    chosen = cells_of_zoo(strategies, ("fp32",))
    assert len(chosen) == 3 * len(architectures())
    assert Cell.of("zero3", "fp32", model="hf:FSMTForConditionalGeneration") in chosen
    cell = chosen[0]
    left = left_out("zoo", {cell: (*ZOO_CHECKS, "memory")})
    assert list(left) == [(cell, "memory")]


def cells_of_zoo(strategies: tuple[str, ...], precisions: tuple[str, ...]) -> list[Cell]:
    """Return the cells of accelerate's suite in the zoo, with these strategies and precisions asked for."""
    return cells(
        "zoo",
        suite.TestAccelerate.matrix,
        driver=DRIVERS.get("accelerate"),
        names=(strategies, precisions),
        world_size=2,
        device="cpu",
    )


def test_each_task_of_transformers_has_a_class_or_a_reason() -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    tasks = set()
    types: set[str] = set()
    for name, table in vars(auto).items():
        if name.startswith("MODEL_FOR_") and name.endswith("_NAMES"):
            task = name.removeprefix("MODEL_FOR_").removesuffix("_NAMES").removesuffix("_MAPPING")
            tasks.add(task.lower())
            types.update(table)
    assert types >= {"t5", "blip-2"}
    chosen = of_tasks()
    assert {*chosen, "causal_lm"} == tasks
    unsupported = {task for task, kind in chosen.items() if not kind}
    assert unsupported == UNSUPPORTED_TASKS.keys()
    kinds = {kind for kind in chosen.values() if kind}
    for kind in kinds:
        assert f"hf:{kind}" in architectures()
    assert len(kinds) > 30


def test_a_class_names_its_task_where_the_model_type_has_several() -> None:
    assert unsupported_reason("hf:BertForTokenClassification") is None
    assert "timm" in str(unsupported_reason("hf:DetrForSegmentation"))


STEPS = [
    "hf:qwen3",
    "hf:t5",
    "hf:distilbert",
    "hf:vit",
    "hf:wav2vec2",
    "hf:BertForTokenClassification",
    # Own losses of outputs, several frames, boxes, series.
    "hf:YolosForObjectDetection",
    "hf:TimesformerForVideoClassification",
    "hf:LayoutLMForQuestionAnswering",
    "hf:PatchTSTForRegression",
    "hf:BertForMultipleChoice",
    "hf:CLIPModel",
    "hf:ASTForAudioClassification",
]


@pytest.mark.parametrize("name", STEPS)
def test_one_of_each_kind_of_input_takes_a_step(name: str) -> None:
    torch = pytest.importorskip("torch")
    tiny = model_of(Cell.of("ddp", "fp32", model=name))
    torch.manual_seed(0)
    model = tiny.make()
    batch = tiny.batch(0, 1)
    assert batch
    for value in batch.values():
        assert len(value) == 2
    tiny.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    parameters = list(model.parameters())
    used = [parameter for parameter in parameters if parameter.grad is not None]
    assert len(used) > 0.9 * len(parameters)
    numel = sum(parameter.numel() for parameter in parameters)
    assert numel < 100_000
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
    driver = driver_of_reference("trainer", name)
    model = driver.tiny.make()
    arguments = transformers.TrainingArguments(str(tmp_path), weight_decay=0.01, use_cpu=True, report_to="none")
    optimizer = transformers.Trainer(model=model, args=arguments).create_optimizer()
    for group, expected in zip(driver.groups(model), optimizer.param_groups, strict=True):
        # Parameters are equal only to themselves.
        assert set(group["params"]) == set(expected["params"])
        assert group["weight_decay"] == expected["weight_decay"]


def driver_of_reference(driver: str, model: str) -> Any:
    """Return the driver of that name, in the one process of the reference."""
    kind = DRIVERS.get(driver)
    return kind(Cell.of("ddp", "fp32", model=model), World(0, 1, 0, "cpu"))


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


ROUNDING = [name for name, reason in UNSUPPORTED.items() if "rounding" in reason]
WITHOUT_MODEL = [name for name in UNSUPPORTED if not name.islower() and name not in ROUNDING]


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITHOUT_MODEL)
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
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if len(trained) < len(parameters) / 2:
        raise RuntimeError("most parameters have no gradient")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model", [architecture for architecture in architectures() if architecture.removeprefix("hf:") not in UNSUPPORTED]
)
def test_no_model_of_the_zoo_turns_on_rounding(model: str) -> None:
    pytest.importorskip("torch")
    assert _drift(model.removeprefix("hf:")) <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROUNDING)
def test_a_class_that_turns_on_rounding_still_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.delitem(UNSUPPORTED, name)
    assert _drift(name, draws=8) > 1


def _drift(name: str, draws: int = 3) -> float:
    """Return how far one bit of its gradients moves losses and norms of a training, 1 being the tolerance.

    Gradients are what ranks add up in another order. One bit of the parameters would say nothing: it moves qwen3 by 4.
    """
    precision = PRECISIONS.get("fp32")
    model = architecture(f"hf:{name}")
    loss_tolerance = precision.loss_tolerance
    norm_tolerance = precision.norm_tolerance * model.norm_spread
    largest = 0.0
    # Which parameters decay differs.
    for driver in ("torch", "trainer"):
        reference = _trained(name, 0, driver)
        if not all(norm for _, norm in reference):
            return math.inf
        for draw in range(1, draws + 1):
            rounded = _trained(name, draw, driver)
            for (loss, norm), (other_loss, other_norm) in zip(reference, rounded, strict=True):
                loss_drift = abs(loss - other_loss) / abs(loss) / loss_tolerance
                norm_drift = abs(norm - other_norm) / abs(norm) / norm_tolerance
                largest = max(largest, loss_drift, norm_drift)
    return largest


def _trained(name: str, draw: int, driver_name: str) -> list[tuple[float, float]]:
    """Return the losses and gradient norms of 20 steps of the reference; but for draw 0 each gradient is rounded otherwise."""
    import torch

    # As in ranks; threads of several xdist workers would wait for one another.
    torch.set_num_threads(1)
    driver = driver_of_reference(driver_name, f"hf:{name}")
    model = driver.build_model()
    generator = torch.Generator().manual_seed(draw)

    def round_otherwise(gradient: Any) -> Any:
        noise = torch.randn(gradient.shape, generator=generator)
        eps = torch.finfo(gradient.dtype).eps
        return gradient * (1 + eps * noise / 2)

    if draw:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(round_otherwise)
    numbers = []
    for step in range(STEPS_OF_A_TRAINING):
        loss = driver.reference(model, step, 2)
        numbers.append((loss, driver.grad_norm))
    return numbers
