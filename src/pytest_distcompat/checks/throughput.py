"""Is a strategy about as fast as the baseline?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check
from pytest_distcompat.cost import cost
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import STEPS, TRAIN_RUN, Scenario
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Trace

#: Strategies to compare with: the first one that the driver supports.
BASELINES = ("ddp", "fsdp2", "zero1")
LIMIT = "throughput"
#: The last step, which both runs must reach.
_LAST = STEPS - 1


def _baseline(cell: Cell, driver: type[Driver]) -> str:
    """Return the first of the baselines that the driver supports.

    It has the cell's precision and world size.
    """
    for name in BASELINES:
        baseline_cell = Cell(name, cell.precision, cell.world_size).spread_as(cell)
        if not driver.unsupported_reason(baseline_cell):
            return baseline_cell.strategy
    return cell.strategy


def _runs(cell: Cell, driver: type[Driver]) -> Scenario:
    # The same run as that of the baseline's own cell, so that it is shared if the matrix has that
    # cell.
    baseline = dataclasses.replace(
        TRAIN_RUN, strategy=_baseline(cell, driver), only=("model", "grad_accum")
    )
    baseline = dataclasses.replace(baseline, name="baseline", same_as=TRAIN_RUN.name)
    return Scenario("throughput", (TRAIN_RUN, baseline))


@check(
    scenario=_runs,
    until=(("train", "step", _LAST), ("baseline", "step", _LAST)),
    order=90,
    limit=LIMIT,
)
def throughput(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that tokens/s per rank reach a fraction (``--distcompat-throughput``) of a baseline's.

    The fraction is 0.9 with ``--distcompat-throughput 0.9``. The baseline is DDP, or the driver's
    first strategy, in the same precision and world size. Tiny models and CPU ranks say little.

    If it fails: compare step times and peak memory in the report. Small units, needless
    recomputation and offloaded state cost most.
    """
    measured = cost(trace)
    baseline_trace = Trace.of(trace.driver, [trace.run("baseline")])
    baseline = cost(baseline_trace, run="baseline")
    if measured is None or baseline is None:
        yield "too few steps to measure the throughput"
        return
    limit = trace.limits.get(LIMIT, 0.0)
    speed = measured.tokens_per_second
    baseline_speed = baseline.tokens_per_second
    if speed < limit * baseline_speed:
        baseline_strategy = trace.run("baseline").cell.partition("-")[0]
        name = STRATEGIES.get(baseline_strategy).name
        fraction = speed / baseline_speed
        yield (
            f"{speed:.4g} tokens a second and rank, "
            f"{fraction:.2f} of {name}'s {baseline_speed:.4g}; "
            f"expected at least {limit:g} of it"
        )
