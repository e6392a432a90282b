"""Check ``evaluation`` on hand-made traces: a metric is another on several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.scenario import EVALUATION
from pytest_distcompat.trace import RunTrace, Snapshot, Trace


def trace(*ranks: Mapping[str, float], alone: Mapping[str, float]) -> Trace:
    """Return the trace of an evaluation on several ranks, and of the same one in one process."""
    return Trace.of("made", [run_trace("rows", *ranks), run_trace("alone", alone)])


def run_trace(run: str, *metrics: Mapping[str, float]) -> RunTrace:
    """Return a run in which the ranks compute these metrics."""
    snapshots = []
    for rank, metrics_of_rank in enumerate(metrics):
        snapshots.append(Snapshot(rank, run, "metrics", 0, metrics=metrics_of_rank))
    return RunTrace(run, len(snapshots), tuple(snapshots))


def findings(*ranks: Mapping[str, float], alone: Mapping[str, float]) -> list[str]:
    """Return the findings of the check."""
    made = trace(*ranks, alone=alone)
    return CHECKS.get("evaluation").findings(Cell("ddp", "fp32"), made)


def test_the_metric_of_one_process() -> None:
    assert findings({"mean": 11.0}, {"mean": 11.0 + 1e-6}, alone={"mean": 11.0}) == []


def test_rows_are_counted_twice() -> None:
    assert findings({"mean": 10.5}, {"mean": 10.5}, alone={"mean": 11.0}) == [
        "rank 0: mean is 10.5; 11 in one process",
        "rank 1: mean is 10.5; 11 in one process",
    ]


def test_a_metric_is_no_number() -> None:
    assert findings({"mean": 11.0}, {"mean": math.nan}, alone={"mean": 11.0}) == [
        "rank 1: mean is nan; 11 in one process"
    ]


def test_metrics_that_a_rank_lacks_are_said_once() -> None:
    alone = {"mean": 11.0, "rows": 23.0, "sum": 253.0}
    assert findings(alone, {"mean": 11.0}, alone=alone) == [
        "rank 1: metrics() lacks 'rows' and 1 others, which one process returns"
    ]


def test_a_metric_that_one_process_lacks() -> None:
    assert findings({"mean": 11.0, "rows": 23.0}, {"mean": 11.0}, alone={"mean": 11.0}) == [
        "rank 0: rows is 23; missing in one process"
    ]


def test_nothing_is_evaluated() -> None:
    message = "metrics() returns no metric in one process, so there is nothing to compare with"
    assert findings({}, {}, alone={}) == [message]


def test_a_silent_rank() -> None:
    assert findings({"mean": 11.0}, alone={"mean": 11.0}) == ["rank 1: no report after metrics"]


def test_one_process_runs_a_strategy_that_the_driver_has() -> None:
    assert [run.cell(Cell("fsdp2", "fp32")).id for run in EVALUATION.runs] == ["fsdp2-fp32-w2", "fsdp2-fp32-w1"]


def test_drivers_without_metrics() -> None:
    check = CHECKS.get("evaluation")
    assert check.not_applicable(Cell("ddp", "fp32"), Driver) == "the driver has no metrics()"
    assert check.not_applicable(Cell("ddp", "fp32"), AccelerateDriver) is None
    assert "tested in ddp-fp32" in (check.not_applicable(Cell("fsdp2", "fp32"), AccelerateDriver) or "")
