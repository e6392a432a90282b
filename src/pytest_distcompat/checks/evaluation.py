"""Is a metric over several ranks that of one process?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank
from pytest_distcompat.checks.coverage import tested_once
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import EVALUATION
from pytest_distcompat.trace import Trace

#: Relative: means are summed in another order.
TOLERANCE = 1e-5


def _has_metrics(cell: Cell, driver: type[Driver]) -> str | None:
    return tested_once(cell, driver) if driver.can("metrics") else "the driver has no metrics()"


@check(
    scenario=EVALUATION,
    until=(("rows", "metrics", 0), ("alone", "metrics", 0)),
    order=9,
    not_applicable=_has_metrics,
    costly=True,
)
def evaluation(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that each metric over rows that do not divide by the ranks equals the metric of one process, on every rank.

    If it fails: rows that fill the last batches are counted twice, or a mean of the ranks' means is taken. Gather with
    ``gather_for_metrics``, which leaves such rows out.
    """
    here, there = trace.run("rows").at("metrics"), trace.run("alone").first("metrics")
    yield from every_rank(here, cell.world_size, "metrics")
    expected = there.metrics if there else {}
    if not expected:
        yield "metrics() returns no metric in one process, so there is nothing to compare with"
        return
    for snapshot in here:
        for name in sorted(expected.keys() | snapshot.metrics.keys()):
            found, alone = (one.get(name, math.nan) for one in (snapshot.metrics, expected))
            if not math.isclose(found, alone, rel_tol=TOLERANCE):
                texts = (f"{one[name]:.6g}" if name in one else "missing" for one in (snapshot.metrics, expected))
                yield f"rank {snapshot.rank}: {name} is {'; '.join(texts)} in one process"
