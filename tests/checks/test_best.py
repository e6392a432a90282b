"""Check ``best`` on hand-made traces: a training ends with the weights of its best checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver

if TYPE_CHECKING:
    from tests.checks.traces import Story

    from pytest_distcompat.trace import Snapshot

RunsOf = Callable[[str, str], "Story"]
CELLS = ("ddp-fp32-w2", "fsdp2-fp32-w2", "zero3-bf16_upcast-w2")


def ended(runs_of: RunsOf, cell: str) -> Story:
    """Return a training that ends with what it saved."""
    story = runs_of(cell, "best")
    saved = {snapshot.rank: snapshot.model for snapshot in story.trace.run("train").at("save")}

    def gone_back(snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, model=saved[snapshot.rank])

    return story.alter(gone_back, action="export")


@pytest.mark.parametrize("cell", CELLS)
def test_the_weights_of_the_checkpoint_are_back(runs_of: RunsOf, cell: str) -> None:
    assert ended(runs_of, cell).findings("best") == []


@pytest.mark.parametrize("cell", CELLS)
def test_the_weights_of_the_last_step_are_kept(runs_of: RunsOf, cell: str) -> None:
    findings = runs_of(cell, "best").findings("best")
    for finding in findings:
        assert "other values after the end of the training" in finding
    ranks = {finding.partition(":")[0] for finding in findings}
    assert ranks == {"rank 0", "rank 1"}


def test_one_weight_is_not_back(runs_of: RunsOf) -> None:
    story = ended(runs_of, "ddp-fp32-w2")
    story = story.parameters({"digest": "9:9"}, only="outlet.weight", action="export", rank=1)
    name = story.live("outlet.weight")
    assert story.findings("best") == [f"rank 1: parameter '{name}': other values after the end of the training"]


def test_a_silent_rank(runs_of: RunsOf) -> None:
    story = ended(runs_of, "ddp-fp32-w2").without("export", rank=0)
    assert story.findings("best") == ["rank 0: no report after the end of the training"]


def test_where_it_applies() -> None:
    reason = CHECKS.get("best").not_applicable(Cell.parse("ddp-fp32-w2"), Driver)
    assert reason == "training ends with the weights of its last step: loads_best() of the driver"
