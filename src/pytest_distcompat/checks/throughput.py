"""Check ``throughput``: a strategy is about as fast as a baseline.

It applies only if the user sets a limit, ``--distcompat-throughput 0.9``: each cell must reach 0.9
of the baseline's tokens a second and rank.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``fsdp2-bf16_upcast-w2``, and a trace with the runs ``train`` (one process group from
start to end, on the cell's ranks) and ``baseline`` (the same training under DDP). Both have, for
each rank and step, the seconds that it took and the number of tokens. The check yields one finding:
``900 tokens a second and rank, 0.75 of ddp's 1200; expected at least 0.9 of it``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``limit`` names the limit that the user must set.
"""

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

#: The strategies to compare with, best first; the first one that the driver supports is taken.
BASELINES = ("ddp", "fsdp2", "zero1")
#: The name of the limit in ``Trace.limits``, and of the option that sets it.
LIMIT = "throughput"
#: The last step, which both runs must reach.
_LAST = STEPS - 1


def _baseline(cell: Cell, driver: type[Driver]) -> str:
    """Return the strategy to compare with, in the cell's precision and world size.

    It is the cell's own if the driver supports none of the baselines.
    """
    for name in BASELINES:
        # On as many machines as the cell.
        baseline_cell = Cell(name, cell.precision, cell.world_size).spread_as(cell)
        if not driver.unsupported_reason(baseline_cell):
            return baseline_cell.strategy
    return cell.strategy


def _runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs ``train`` and ``baseline``."""
    # It is the run ``train`` of the baseline's own cell (``same_as``). So it is not run twice if
    # the matrix has that cell. Of the cell's options it keeps ``only`` these.
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
        # The id of the run's cell begins with the strategy: ``ddp-bf16_upcast-w2``.
        baseline_strategy = trace.run("baseline").cell.partition("-")[0]
        name = STRATEGIES.get(baseline_strategy).name
        fraction = speed / baseline_speed
        yield (
            f"{speed:.4g} tokens a second and rank, "
            f"{fraction:.2f} of {name}'s {baseline_speed:.4g}; "
            f"expected at least {limit:g} of it"
        )
