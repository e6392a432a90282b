"""The law of a cell: the plain one, or that of an extension, found by its entry point."""

from __future__ import annotations

import pytest

from pytest_distcompat import law
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.expect import fails
from pytest_distcompat.judge import judge
from pytest_distcompat.law import LAWS, PLAIN, Law, law_of
from pytest_distcompat.scenario import PARITY, TRAIN, Scenario
from pytest_distcompat.status import Status
from pytest_distcompat.trace import Trace

PLAIN_CELL = Cell("ddp", "fp32")
SWEPT_CELL = Cell.of("ddp", "fp32", set="DistributedDataParallel.static_graph=true")
TRACE = Trace("toy", {})


class Strict(Law):
    """A law by which every claim reads one run and is found broken."""

    name = "strict"

    def runs(self, cell: Cell, scenario: Scenario) -> Scenario:
        return TRAIN

    def findings(self, check: law.CheckLike, cell: Cell, trace: Trace) -> list[str]:
        return [f"{check.name} is broken by law"]


def test_cells_with_settings_have_a_law_of_their_own() -> None:
    assert law_of(PLAIN_CELL) is PLAIN
    assert law_of(SWEPT_CELL).name == "sweep"


def test_without_extensions_every_cell_has_the_plain_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(LAWS), "by_name", {})
    assert law_of(SWEPT_CELL) is PLAIN
    driver = DRIVERS.get("torch")
    assert CHECKS.get("parity").runs(SWEPT_CELL, driver) == PARITY
    reason = "the torch driver has no DistributedDataParallel under ddp"
    assert driver.unsupported_reason(SWEPT_CELL) == reason


def test_a_law_chooses_runs_and_findings_and_the_judge_keeps_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(LAWS), "by_name", {"strict": Strict()})
    check = CHECKS.get("parity")
    assert check.runs(PLAIN_CELL, DRIVERS.get("torch")) == TRAIN
    names = CHECKS.get("names")
    judged = judge(names, PLAIN_CELL, TRACE, [fails("names", reason="known", match="by law")])
    assert judged.status is Status.KNOWN
    assert judged.message == "names is broken by law"
