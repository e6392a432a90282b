"""The engine without pytest: ``check_driver``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat import Cell, Driver, Matrix, UsageProblem, check_driver, engine, fails
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.scenario import Scenario
from pytest_distcompat.trace import RunFailure, RunTrace, Trace

if TYPE_CHECKING:
    from torch.nn import Module

HERE = f"{__name__}:OneStrategy"


class OneStrategy(TorchDriver):
    """A driver that supports DDP only."""

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        return None if cell.strategy == "ddp" else "this trainer speaks DDP only"


class CountsRanks(TorchDriver):
    """A driver whose reference reads the number of ranks from its cell."""

    def reference(self, model: Module, number: int, ranks: int) -> float:
        if self.cell.world_size != ranks:
            raise ValueError(f"the cell has {self.cell.world_size} ranks, the compared run {ranks}")
        return super().reference(model, number, self.cell.world_size)


class NoRanks:
    """A runner all of whose runs hang."""

    def trace(self, driver: str, cell: Cell, scenario: Scenario) -> Trace:
        hung = RunFailure("hung", "rank 0 hung", "rank 0 hung in step")
        return Trace.of(driver, [RunTrace(run.name, 2, (), hung, cell.id) for run in scenario.runs])


@pytest.mark.parametrize(
    ("driver", "cells", "checks", "message"),
    [
        ("torch", "fsdp2", None, "'fsdp2' is no cell id; one reads like"),
        ("torch", "fsdp9-fp32-w2", None, "no strategy named 'fsdp9'. Known: ddp,"),
        ("torch", "ddp-fp33-w2", None, "no precision named 'fp33'. Known: "),
        ("torch", "ddp-fp32-w2", ["name"], "no check named 'name'. Known: active, names"),
        ("pytorch", "ddp-fp32-w2", None, "no driver named 'pytorch'. Known: "),
    ],
)
def test_an_unknown_name_is_a_usage_error(driver: str, cells: str, checks: list[str] | None, message: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        check_driver(driver, cells, checks, device="cpu")
    assert str(caught.value).startswith(message)


def test_a_class_that_ranks_cannot_import_is_a_usage_error() -> None:
    class Local(Driver):
        pass

    with pytest.raises(
        UsageProblem, match=r"Local is defined in .*test_engine: ranks could not import it; expected a cla"
    ):
        check_driver(Local, "ddp-fp32-w2")


def test_no_cell_is_a_usage_error() -> None:
    with pytest.raises(UsageProblem, match=r"^cells=\[\]: expected at least one cell$"):
        check_driver("torch", [], device="cpu")


def test_more_ranks_than_gpus_and_an_unknown_device_are_usage_errors() -> None:
    with pytest.raises(UsageProblem, match=r"device cuda: 64 ranks need 64 GPUs, \d+ visible"):
        check_driver("torch", "ddp-fp32-w64", ["names"], device="cuda")
    with pytest.raises(UsageProblem, match="device 'tpu' is not right: expected auto, cuda or cpu"):
        check_driver("torch", "ddp-fp32-w2", ["names"], device="tpu")


def test_a_cell_that_cannot_run_has_a_verdict_with_the_reason() -> None:
    verdicts = check_driver(HERE, Matrix(("ddp", "fsdp2"), ("fp32",)), ["float8", "throughput"], device="cpu")
    assert [(verdict.cell, verdict.check, verdict.status, verdict.reason) for verdict in verdicts] == [
        ("ddp-fp32-w2", "float8", "skipped", "fp32 has no 8-bit layers"),
        ("ddp-fp32-w2", "throughput", "skipped", "no limit was given: --distcompat-throughput"),
        ("fsdp2-fp32-w2", "float8", "skipped", "this trainer speaks DDP only"),
    ]
    for verdict in verdicts:
        assert not verdict.ok


def test_without_names_all_checks_that_apply_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "Runner", lambda *_, **__: NoRanks())
    verdicts = check_driver("torch", "ddp-fp32-w2-model_mlp", device="cpu")
    names = [verdict.check for verdict in verdicts]
    assert names[:4] == ["active", "names", "optimizer", "dtypes"]
    assert not {"float8", "throughput", "scaling"} & set(names)
    assert {(verdict.status, verdict.message) for verdict in verdicts} == {("hung", "rank 0 hung in step")}


@pytest.mark.spawn
def test_a_driver_on_real_ranks(tmp_path: Path) -> None:
    """With an expectation that does not hold: the cell passes."""
    cell = Cell.of("fsdp2", "fp32", model="mlp")
    wrong = fails("names", reason="names differ", strategy="fsdp2")
    verdicts = check_driver(TorchDriver, [cell], ["active", "names"], expect=[wrong], device="cpu", store=tmp_path)
    assert [(verdict.check, verdict.status) for verdict in verdicts] == [("active", "passed"), ("names", "fixed?")]
    assert list(tmp_path.glob("*/run.json"))


@pytest.mark.spawn
def test_the_reference_has_the_ranks_of_the_compared_run_in_its_cell() -> None:
    cell = Cell.of("ddp", "fp32", model="mlp")
    (verdicts,) = check_driver(CountsRanks, [cell], ["parity"], device="cpu")
    assert verdicts.status == "passed", verdicts.message


def test_a_cell_over_several_nodes_is_refused() -> None:
    with pytest.raises(UsageProblem, match="cell ddp-fp32-w2-n2: only pytest runs cells over several nodes"):
        check_driver("torch", "ddp-fp32-w2-n2", ["names"], device="cpu")
