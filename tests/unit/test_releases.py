"""Older releases: how TrainingArguments are translated for them, and which cells they do not support."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.drivers.trainer import TrainerDriver
from pytest_distcompat.ext.upstream.drivers import _releases
from pytest_distcompat.installed import version_of
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES, WrapSpec
from pytest_distcompat.world import World


def translated(cell: str, release: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the TrainingArguments and environment of the cell's strategy in that release."""
    parsed = Cell.parse(cell)
    strategy = STRATEGIES.get(parsed.strategy)
    assert strategy.transformers is not None
    settings = dict(strategy.transformers(PRECISIONS.get(parsed.precision), parsed, WrapSpec(("LlamaDecoderLayer",))))
    return _releases.fsdp_for_release(settings, Version(release))


@pytest.mark.parametrize("release", ["5.10.1", "5.23.0", "6.0"])
def test_current_transformers_need_no_translation(release: str) -> None:
    assert translated("fsdp2-fp32-w2", release) == ({}, {})


@pytest.mark.parametrize("release", ["4.51.0", "5.9.0"])
def test_other_strategies_need_no_translation(release: str) -> None:
    assert translated("ddp-fp32-w2", release) == ({}, {})
    assert translated("zero2-fp32-w2", release) == ({}, {})


@pytest.mark.parametrize(
    ("cell", "fsdp"),
    [
        ("fsdp2-fp32-w2", "full_shard auto_wrap"),
        ("fsdp1-fp32-w2", "full_shard auto_wrap"),
        ("fsdp2-fp32-w2-no_reshard_after_forward", "shard_grad_op auto_wrap"),
        ("fsdp1-fp32-w2-no_reshard_after_forward", "shard_grad_op auto_wrap"),
        ("fsdp1-fp32-w2-cpu_offload", "full_shard auto_wrap offload"),
    ],
)
@pytest.mark.parametrize("release", ["4.57.6", "5.0.0", "5.9.0"])
def test_older_transformers_take_fsdp_as_a_text(cell: str, fsdp: str, release: str) -> None:
    arguments, variables = translated(cell, release)
    assert arguments["fsdp"] == fsdp
    assert "cpu_offload" not in arguments["fsdp_config"]
    # Without it FSDP wraps no block: https://huggingface.co/docs/transformers/v5.5.4/en/main_classes/trainer.
    assert arguments["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]
    assert variables["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"


def test_transformers_4_reads_fsdp2_from_the_environment_alone() -> None:
    _, variables = translated("fsdp2-fp32-w2-no_reshard_after_forward", "4.57.6")
    assert variables["FSDP_VERSION"] == "2"
    assert variables["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    arguments, variables = translated("fsdp2-fp32-w2-no_reshard_after_forward", "5.0.0")
    assert "FSDP_VERSION" not in variables
    assert arguments["fsdp_config"]["version"] == 2
    assert arguments["fsdp_config"]["reshard_after_forward"] is False


def test_weights_of_rank_0_are_broadcast_with_the_option() -> None:
    message = "sync_module_states"
    assert translated("fsdp2-fp32-w2-cpu_ram_efficient_loading", "5.5.4")[0]["fsdp_config"][message] is True
    assert translated("fsdp2-fp32-w2", "5.5.4")[0]["fsdp_config"][message] is False


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces the installed versions of packages."""
    others: dict[str, str] = {}
    monkeypatch.setattr(_releases, "release", lambda name: others.get(name) or version_of(name))
    return others.update


#: Driver, cell, package, the last release without support and the first with it.
FIRST = [
    (AccelerateDriver, "fsdp2-fp32-w4-dp_replicate_2", "accelerate", "1.9.0 1.10.0"),
    (AccelerateDriver, "fsdp2-fp32-w2-compile_regional", "accelerate", "1.6.0 1.7.0"),
    (AccelerateDriver, "fsdp2-fp32-w2-state_dict_full", "accelerate", "1.6.0 1.7.0"),
    (TrainerDriver, "fsdp2-fp32-w4-dp_replicate_2", "accelerate", "1.9.0 1.10.0"),
    (TrainerDriver, "fsdp2-fp32-w4-dp_replicate_2", "transformers", "4.55.4 4.56.0"),
    (TrainerDriver, "fsdp2-fp32-w2", "transformers", "4.50.3 4.51.0"),
    (DeepSpeedDriver, "zero2-bf16_pure-w2", "deepspeed", "0.18.2 0.18.3"),
    (DeepSpeedDriver, "zero0-bf16_upcast-w2", "deepspeed", "0.17.5 0.17.6"),
    (AccelerateDriver, "zero0-bf16_upcast-w2", "deepspeed", "0.17.5 0.17.6"),
]


@pytest.mark.parametrize(("driver", "cell", "package", "releases"), FIRST)
def test_a_release_without_the_option_does_not_run_the_cell(
    installed: Callable[..., None], driver: type[Driver], cell: str, package: str, releases: str
) -> None:
    last, first = releases.split()
    installed({package: last})
    reason = driver.unsupported_reason(Cell.parse(cell))
    assert reason is not None
    assert reason.startswith(f"{package}>=")
    assert reason.endswith(f"is needed for this cell, {last} is installed")
    installed({package: first})
    assert driver.unsupported_reason(Cell.parse(cell)) is None


def test_a_release_without_the_option_does_not_load_its_checkpoint(installed: Callable[..., None]) -> None:
    cell = Cell.parse("fsdp1-fp32-w2")
    not_applicable = CHECKS.get("portable").not_applicable
    assert not_applicable(cell, TrainerDriver) is None
    installed({"transformers": "4.50.3"})
    message = "fsdp2 cannot go on from it: transformers>=4.51 is needed for this cell, 4.50.3 is installed"
    assert not_applicable(cell, TrainerDriver) == message


def test_cells_that_an_old_release_supports_are_run(installed: Callable[..., None]) -> None:
    installed({"accelerate": "1.6.0", "transformers": "4.50.3", "deepspeed": "0.16.0"})
    for driver, cell in [
        (AccelerateDriver, "fsdp2-bf16_upcast-w2"),
        (AccelerateDriver, "fsdp1-fp32-w2-no_use_orig_params"),
        (TrainerDriver, "fsdp1-fp32-w2"),
        (DeepSpeedDriver, "zero2-bf16_upcast-w2"),
    ]:
        assert driver.unsupported_reason(Cell.parse(cell)) is None


def test_a_missing_package_is_named() -> None:
    assert _releases.missing(["torch", "no_such_library.part"]) == "no_such_library is not installed"
    assert _releases.missing(["torch>=2"]) is None


def test_inductor_without_a_compiler_does_not_run_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    reasons = [
        TorchDriver.unsupported_reason(Cell.parse(f"fsdp2-fp32-w2-model_mlp-{option}"))
        for option in ("compile", "compile_aot_eager")
    ]
    assert reasons == ["inductor needs a C++ compiler, and there is none", None]


class OldTrainer:
    """Trainer of transformers 4: it logs a rounded loss, after it has added the loss to a total."""

    def __init__(self, **settings: Any) -> None:
        self._total_loss_scalar: float = settings["args"].first
        self.logged: list[float] = []

    def trained(self, loss: float) -> float:
        """Log the loss of a step and return what the log has."""
        self._total_loss_scalar += loss
        self.log({"loss": round(loss, 4)}, None)
        return self.logged[-1]

    def log(self, logs: dict[str, float], _start: None) -> None:
        """Keep the loss."""
        self.logged.append(logs["loss"])


def test_the_loss_of_a_step_is_not_the_rounded_one_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Trainer=OldTrainer))
    trainer = object.__new__(TrainerDriver).make_trainer(args=SimpleNamespace(first=0.0))
    assert [trainer.trained(loss) for loss in (1.574362, 1.540748)] == [1.574362, 1.540748]
    assert math.isnan(trainer.trained(math.nan))
    assert trainer.trained(1.5) == 1.5


def test_a_loss_without_the_number_of_items_is_the_mean() -> None:
    torch = pytest.importorskip("torch")
    loss = TrainerDriver(Cell.parse("ddp-fp32-w2-model_mlp"), World(0, 2, 0, "cpu"))._loss()
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 0])
    assert loss(outputs, labels, None) == loss(outputs, labels, torch.tensor(2))
    assert loss(outputs, labels, None) == torch.nn.functional.cross_entropy(outputs, labels)
