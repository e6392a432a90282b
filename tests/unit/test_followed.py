"""What changes a training on purpose changes the reference of the built-in drivers too."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.world import World

torch = pytest.importorskip("torch")


def driver(name: str, settings: str = "", **options: Any) -> Any:
    if settings:
        options["set"] = settings
    return driver_of(name, Cell.of("ddp", "fp32", model="mlp", **options))


def driver_of(name: str, cell: Cell) -> Any:
    """Return the driver of that name in this cell, as the only rank has it."""
    kind = DRIVERS.get(name)
    return kind(cell, World(0, 1, 0, "cpu"))


def made(name: str, settings: str = "", **options: Any) -> Any:
    return driver(name, settings, **options).make_optimizer(torch.nn.Linear(4, 4))


@pytest.mark.parametrize("name", ["torch", "accelerate"])
def test_the_arguments_of_each_optimizer_that_a_cell_can_ask_for_are_settings(name: str) -> None:
    kind: Any = DRIVERS.get(name)
    names = {source.name for source in kind.sources}
    assert names >= {"AdamW", "SGD", "Adafactor", "Muon", "AdamW8bit"}


@pytest.mark.parametrize(
    ("optimizer", "settings", "argument", "value"),
    [
        ("sgd", "SGD.nesterov=true", "nesterov", True),
        ("sgd", "SGD.momentum=0.5", "momentum", 0.5),
        ("adafactor", "Adafactor.d=2.0", "d", 2.0),
        ("adamw", "AdamW.amsgrad=true", "amsgrad", True),
        ("muon", "Muon.ns_steps=2", "ns_steps", 2),
    ],
)
def test_an_optimizer_gets_its_settings(optimizer: str, settings: str, argument: str, value: object) -> None:
    optimizers = made("torch", settings, optimizer=optimizer)
    first = optimizers[0] if isinstance(optimizers, list) else optimizers
    assert first.defaults[argument] == value
    # The driver's own arguments stay.
    assert first.defaults["lr"] == 3e-3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("TrainingArguments.learning_rate=0.001", {"lr": 0.001}),
        ("ds_config.optimizer.params.lr=auto+TrainingArguments.learning_rate=0.001", {"lr": 0.001}),
        ("TrainingArguments.adam_beta1=0.5", {"betas": (0.5, 0.999)}),
        ("TrainingArguments.adam_epsilon=0.5", {"eps": 0.5}),
        ("TrainingArguments.weight_decay=0.5", {"weight_decay": 0.5}),
    ],
)
def test_the_reference_of_trainer_follows_its_numbers(settings: str, expected: dict[str, object]) -> None:
    usual = made("trainer").param_groups[0]
    group = made("trainer", settings).param_groups[0]
    del group["params"]
    changed = {key: value for key, value in group.items() if value != usual[key]}
    assert changed == expected


@pytest.mark.parametrize(
    ("option", "settings", "kind", "expected"),
    [
        ("sgd", "", "SGD", {"momentum": 0.9, "nesterov": False}),
        (
            "sgd",
            "TrainingArguments.optim_args=momentum=0.5,nesterov=true",
            "SGD",
            {"momentum": 0.5, "nesterov": True},
        ),
        ("adafactor", "", "Adafactor", {"relative_step": False, "scale_parameter": False, "lr": 3e-3}),
    ],
)
def test_the_reference_of_trainer_has_the_optimizer_and_its_own_arguments(
    option: str, settings: str, kind: str, expected: dict[str, object]
) -> None:
    pytest.importorskip("transformers")
    optimizer = made("trainer", settings, optimizer=option)
    assert type(optimizer).__name__ == kind
    decayed, undecayed = optimizer.param_groups
    for key, value in expected.items():
        assert decayed[key] == value
    assert decayed["weight_decay"] == 0.01
    assert undecayed["weight_decay"] == 0.0


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("rmsprop", "RMSprop"), ("adamw_torch_fused", "AdamW")])
def test_the_reference_of_trainer_has_the_optimizer_that_is_named(name: str, kind: str) -> None:
    optimizer = made("trainer", f"TrainingArguments.optim={name}")
    assert type(optimizer).__name__ == kind


def test_the_reference_of_trainer_follows_the_schedule() -> None:
    pytest.importorskip("transformers")
    settings = "TrainingArguments.lr_scheduler_type=linear+TrainingArguments.lr_scheduler_kwargs=null"
    trainer = driver("trainer", f"{settings}+TrainingArguments.warmup_steps=0.5")
    optimizer = trainer.make_optimizer(torch.nn.Linear(4, 4))
    scheduler = trainer.make_scheduler(optimizer)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"] / 3e-3)
        optimizer.step()
        scheduler.step()
    # Half of the 20 steps warm up, the others decay.
    assert rates[::5] == pytest.approx([0.0, 0.5, 1.0, 0.5])


@pytest.mark.parametrize(
    ("name", "settings", "norm"),
    [
        ("deepspeed", "ds_config.gradient_clipping=0.5", 0.5),
        ("accelerate", "DeepSpeedPlugin.gradient_clipping=0.5", 0.5),
        ("trainer", "TrainingArguments.max_grad_norm=0.0", 0.0),
        ("trainer", "ds_config.gradient_clipping=auto", 1.0),
    ],
)
def test_the_reference_clips_to_what_is_set(name: str, settings: str, norm: float) -> None:
    trainer = driver(name, settings)
    model = trainer.tiny.make()
    trainer.reference(model, 0, 1)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    clipped = float(torch.nn.utils.get_total_norm(gradients))
    expected = trainer.grad_norm
    # A norm of zero is no clipping.
    if norm:
        expected = min(trainer.grad_norm, norm)
    assert clipped == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["torch", "trainer"])
def test_the_reference_says_what_its_loss_would_be_if_something_else_counted_alike(name: str) -> None:
    pytest.importorskip("transformers")
    trainer = driver_of(name, Cell.of("ddp", "fp32", grad_accum=2))
    # The last step of an epoch has one micro-batch of two.
    for number in (0, 7):
        loss = trainer.reference(trainer.tiny.make(), number, 2)
        trainer.optimizer = None
        own_loss = pytest.approx(loss, rel=1e-5)
        by_token = trainer.averages["each token"]
        by_micro_batch = trainer.averages["each micro-batch, also those that are missing,"]
        if name == "trainer":
            assert by_token == own_loss
            assert by_micro_batch != own_loss
        else:
            assert by_token != own_loss
            assert by_micro_batch == own_loss
        assert trainer.averages["each rank"] != own_loss


def test_the_reference_of_deepspeed_has_the_optimizer_and_schedule_of_the_json() -> None:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    momentum = "ds_config.optimizer.type=SGD+ds_config.optimizer.params.lr=0.5+ds_config.optimizer.params.momentum=0.9"
    engine = driver("deepspeed", f"{momentum}+ds_config.scheduler.type=OneCycle+{ONE_CYCLE}")
    optimizer = engine.make_optimizer(torch.nn.Linear(4, 4))
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["momentum"] == 0.9
    by_deepspeed = torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), momentum=0.9)
    expected = schedules.OneCycle(by_deepspeed, cycle_min_lr=0.001, cycle_max_lr=0.003)
    scheduler = engine.make_scheduler(optimizer)
    rates = set()
    for _ in range(3):
        scheduler.step()
        expected.step()
        rate = by_deepspeed.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == rate
        rates.add(rate)
    assert len(rates) == 3


def test_the_reference_of_deepspeed_has_the_schedule_for_all_param_groups() -> None:
    """DeepSpeed's own WarmupCosineLR forgets all groups but the first."""
    pytest.importorskip("deepspeed")
    schedule = "ds_config.scheduler.type=OneCycle"
    sgd = "ds_config.optimizer.type=SGD+ds_config.optimizer.params.lr=0.5"
    engine = driver("deepspeed", f"{sgd}+{schedule}+{ONE_CYCLE}", param_groups=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = engine.make_optimizer(model)
    assert len(optimizer.param_groups) > 1
    engine.make_scheduler(optimizer).step()
    rates = {group["lr"] for group in optimizer.param_groups}
    assert len(rates) == 1


def test_the_reference_of_deepspeed_has_its_muon_for_matrices_but_embeddings_and_the_last_layer() -> None:
    pytest.importorskip("deepspeed")
    model = torch.nn.ModuleDict()
    for name in ("embed", "inner", "lm_head"):
        model[name] = torch.nn.Linear(4, 4)
    # The driver would turn the compiler off for this whole process.
    with torch.compiler.set_stance("default"):
        deepspeed = driver("deepspeed", "ds_config.optimizer.params.momentum=0.5", optimizer="muon")
        optimizer = deepspeed.make_optimizer(model)
    groups = {group["use_muon"]: group for group in optimizer.param_groups}
    by_muon = groups[True]
    others = groups[False]
    (parameter,) = by_muon["params"]
    assert parameter is model["inner"].weight
    assert len(others["params"]) == 5
    assert by_muon["momentum"] == 0.5
    assert by_muon["lr"] == 3e-3
    assert others["weight_decay"] == 0.01


ONE_CYCLE = "ds_config.scheduler.params.cycle_min_lr=0.001+ds_config.scheduler.params.cycle_max_lr=0.003"


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ("", [0.2, 0.1, 0.3, 0.4]),
        # Two micro-batches of each of two ranks, and each rank half of the loss.
        ("TrainingArguments.average_tokens_across_devices=false", [1 / 3, 1 / 6, 3 / 14, 2 / 7]),
    ],
)
def test_the_reference_of_trainer_averages_as_the_setting_says(settings: str, weights: list[float]) -> None:
    trainer = driver("trainer", settings)
    shares = trainer._shares([4, 2, 6, 8], 2)
    assert [count / divisor for count, divisor in shares] == pytest.approx(weights)


def test_the_reference_of_trainer_smooths_labels() -> None:
    from types import SimpleNamespace

    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, -100, 3, 4]])
    smoothing = driver("trainer", "TrainingArguments.label_smoothing_factor=0.5")

    def model(**_: Any) -> Any:
        return SimpleNamespace(logits=logits)

    loss = smoothing.reference_loss(model, {"input_ids": labels, "labels": labels})
    log_probabilities = logits[0, 1:3].log_softmax(-1)
    of_labels = torch.stack((log_probabilities[0, 3], log_probabilities[1, 4]))
    expected = 0.5 * -of_labels.mean() + 0.5 * -log_probabilities.mean()
    assert loss == pytest.approx(float(expected))


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 1.0), ("sum", 2.0)])
def test_the_reference_of_deepspeed_adds_up_the_ranks_where_the_json_says_so(reduction: str, factor: float) -> None:
    plain = driver("deepspeed")
    plain.reference(plain.build_model(), 0, 2)
    following = driver("deepspeed", f"ds_config.gradient_allreduce_op={reduction}")
    following.reference(following.build_model(), 0, 2)
    assert following.grad_norm == pytest.approx(factor * plain.grad_norm)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("settings", "decays"),
    [
        # After an epoch of 15 micro-batches in 8 steps the first of two micro-batches decays.
        ("Accelerator.step_scheduler_with_optimizer=false", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_the_reference_of_accelerate_steps_the_schedule_as_the_setting_says(settings: str, decays: list[int]) -> None:
    options = {"set": settings} if settings else {}
    cell = Cell.of("ddp", "fp32", 2, model="mlp", grad_accum=2, **options)
    accelerate = driver_of("accelerate", cell)
    model = accelerate.tiny.make()
    rates: list[float] = []
    accelerate.optimizer = accelerate.make_optimizer(model)
    accelerate.scheduler = accelerate.make_scheduler(accelerate.optimizer)

    def note_rate(optimizer: Any, *_: Any) -> None:
        rates.append(optimizer.param_groups[0]["lr"])

    accelerate.optimizer.register_step_pre_hook(note_rate)
    for number in range(10):
        accelerate.reference(model, number, 2)
    expected = [3e-3 * 0.95**count for count in decays]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("settings", ["TrainingArguments.warmup_steps=0.5", "TrainingArguments.warmup_ratio=0.5"])
def test_the_reference_of_trainer_warms_up_for_a_part_of_all_steps(settings: str) -> None:
    pytest.importorskip("transformers")
    schedule = "TrainingArguments.lr_scheduler_type=linear+TrainingArguments.lr_scheduler_kwargs=null"
    trainer = driver("trainer", f"{schedule}+{settings}")
    optimizer = trainer.make_optimizer(torch.nn.Linear(4, 4))
    trainer.make_scheduler(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize(
    ("setting", "checks"),
    [
        ("TrainingArguments.neftune_noise_alpha=0.0", []),
        ("TrainingArguments.neftune_noise_alpha=1e~06", []),
        ("TrainingArguments.neftune_noise_alpha=1.0", ["clipping", "gradients"]),
        ("ds_config.gradient_allreduce_op=sum", []),
        ("Accelerator.step_scheduler_with_optimizer=false", []),
        ("GradientAccumulationPlugin.adjust_scheduler=false", []),
        ("ds_config.torch_autocast.enabled=true", ["dtypes"]),
        ("ds_config.zero_optimization.zero_quantized_weights=true", ["dtypes"]),
    ],
)
def test_a_setting_is_meant_to_fail_only_what_no_reference_can_follow(setting: str, checks: list[str]) -> None:
    from pytest_distcompat.ext.upstream.sweep.rules import meant_to_fail

    assert meant_to_fail(setting) == checks


@pytest.mark.parametrize(
    ("setting", "check", "precision"),
    [
        ("ds_config.torch_autocast.enabled=true", "parity", "bf16_upcast"),
        ("ds_config.torch_autocast.enabled=true", "export", "bf16_upcast"),
        ("ds_config.torch_autocast.enabled=true", "resume", "fp32"),
        ("ds_config.zero_optimization.zero_quantized_weights=true", "gradients", "fp8"),
        ("ds_config.gradient_allreduce_op=sum", "parity", "fp32"),
    ],
)
def test_a_setting_that_rounds_has_the_tolerances_of_a_precision(setting: str, check: str, precision: str) -> None:
    from types import SimpleNamespace

    from pytest_distcompat.ext.upstream.sweep.law import SWEEP

    asked: list[str] = []

    def findings(cell: Cell, trace: Any) -> list[str]:
        asked.append(cell.precision)
        return ["found"]

    judging: Any = SimpleNamespace(name=check, findings=findings, claim=findings)
    trace: Any = SimpleNamespace(runs={})
    cell = Cell.of("zero2", "fp32", set=setting)
    assert SWEEP.findings(judging, cell, trace) == ["found"]
    assert asked == [precision]


@pytest.mark.parametrize(
    ("setting", "check", "of_own_precision", "expected"),
    [
        ("ds_config.torch_autocast.enabled=true", "parity", ["off"], []),
        ("ds_config.torch_autocast.enabled=true", "parity", [], ["rounds nothing"]),
        ("ds_config.torch_autocast.enabled=false", "parity", [], []),
        ("ds_config.torch_autocast.enabled=true", "export", [], []),
        ("ds_config.zero_optimization.zero_quantized_weights=true", "parity", [], []),
    ],
)
def test_rounding_that_must_show_does_so_by_the_tolerances_of_the_own_precision(
    setting: str, check: str, of_own_precision: list[str], expected: list[str]
) -> None:
    from types import SimpleNamespace

    from pytest_distcompat.ext.upstream.sweep.law import SWEEP

    def findings(cell: Cell, trace: Any) -> list[str]:
        return of_own_precision if cell.precision == "fp32" else []

    judging: Any = SimpleNamespace(name=check, findings=findings, claim=findings)
    cell = Cell.of("zero2", "fp32", set=setting)
    trace: Any = SimpleNamespace(runs={}, stand_in=None)
    actual = SWEEP.findings(judging, cell, trace)
    assert len(actual) == len(expected)
    for finding, words in zip(actual, expected, strict=True):
        assert finding.startswith(f"{setting} {words}: ")
    trace.stand_in = "simulated"
    assert SWEEP.findings(judging, cell, trace) == []


@pytest.mark.parametrize("field", ["label_smoothing_factor", "average_tokens_across_devices"])
def test_what_the_reference_follows_is_compared_with_it(field: str) -> None:
    from pytest_distcompat.ext.upstream.sweep.rules import meant_to_fail
    from pytest_distcompat.scenario import FOLLOWED

    assert f"TrainingArguments.{field}" in FOLLOWED
    assert meant_to_fail(f"TrainingArguments.{field}=0.5") == []


@pytest.mark.parametrize(("stateful", "skipped"), [("true", []), ("false", [3])])
def test_a_loader_that_goes_on_by_itself_skips_no_batches(stateful: str, skipped: list[int]) -> None:
    from types import SimpleNamespace

    accelerate: Any = driver("accelerate", f"DataLoaderConfiguration.use_stateful_dataloader={stateful}")
    asked: list[int] = []

    def skip_first_batches(loader: list[str], count: int) -> list[str]:
        asked.append(count)
        return loader[count:]

    accelerate.accelerator = SimpleNamespace(skip_first_batches=skip_first_batches)
    accelerate.loader = ["a", "b", "c", "d"]
    batch = accelerate.next_batch(3)
    assert asked == skipped
    if skipped:
        assert batch == "d"
    else:
        assert batch == "a"
    assert ("torchdata" in accelerate.needs(accelerate.cell)) == (stateful == "true")
