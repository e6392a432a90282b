"""Two settings that contradict each other: one of them wins everywhere, or the run is a mix of both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.ext.upstream.sweep.law import OTHER_REFERENCE
from pytest_distcompat.judge import judge

if TYPE_CHECKING:
    from tests.checks.traces import Sound

    from pytest_distcompat.trace import RunTrace, Snapshot, Trace

TWO = ("TrainingArguments.max_grad_norm=0.5", "ds_config.gradient_clipping=1.0")
CELL = Cell.of("ddp", "fp32", set="+".join(TWO))


def changed(run: RunTrace, name: str, *, loss: float = 1.0, square: float = 1.0) -> RunTrace:
    """Return a reference in which losses, or the squares of what the optimizer gets, are larger by a factor."""

    def change(snapshot: Snapshot) -> Snapshot:
        steps = tuple(replace(step, square=step.square * square) for step in snapshot.steps)
        new_loss = snapshot.loss
        if new_loss is not None:
            new_loss *= loss
        return replace(snapshot, loss=new_loss, steps=steps)

    return replace(run, name=name, snapshots=tuple(map(change, run.snapshots)))


@pytest.fixture
def trace(sound: Sound) -> Trace:
    return replace(sound("ddp-fp32-w2").trace, driver="torch")


def with_references(trace: Trace, first: RunTrace, second: RunTrace) -> Trace:
    return replace(trace, runs={**trace.runs, "reference": first, OTHER_REFERENCE: second})


def test_checks_that_hold_with_one_setting_each_are_a_mix(trace: Trace) -> None:
    run = trace.run("reference")
    unclipped = changed(run, "reference", square=4.0)
    other_loss = changed(run, OTHER_REFERENCE, loss=3.0)
    mixed = with_references(trace, unclipped, other_loss)
    first, second = TWO
    for name, own, other, theirs in (("parity", first, "clipping", second), ("clipping", second, "parity", first)):
        verdict = judge(CHECKS.get(name), CELL, mixed)
        assert verdict.status == "failed"
        assert verdict.message == (
            f"a mix of two settings that contradict each other: {name} holds with {own} alone, {other} with {theirs} "
            "alone; expected one of them everywhere"
        )


@pytest.mark.parametrize("first_wins", [True, False])
def test_a_setting_may_win_everywhere(trace: Trace, first_wins: bool) -> None:
    run = trace.run("reference")
    other = changed(run, "other", loss=3.0, square=4.0)
    if first_wins:
        with_winner = with_references(trace, run, other)
    else:
        with_winner = with_references(trace, other, run)
    for name in ("parity", "clipping"):
        verdict = judge(CHECKS.get(name), CELL, with_winner)
        assert verdict.status == "passed"


def test_a_check_that_holds_with_both_or_with_neither_is_part_of_no_mix(trace: Trace) -> None:
    run = trace.run("reference")
    neither = changed(run, "neither", loss=3.0)
    unclipped = changed(neither, OTHER_REFERENCE, square=4.0)
    with_neither = with_references(trace, neither, unclipped)
    parity = judge(CHECKS.get("parity"), CELL, with_neither)
    clipping = judge(CHECKS.get("clipping"), CELL, with_neither)
    assert parity.message.count("the loss is") == 2
    assert clipping.status == "passed"
