"""Do ranks draw their own random numbers, and does a resumed run go on with them?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, pairs
from pytest_distcompat.driver import Driver
from pytest_distcompat.models import model_of
from pytest_distcompat.scenario import RESUME, SAVED
from pytest_distcompat.trace import Snapshot, Trace


def _draws_nothing(cell: Cell, driver: type[Driver]) -> str | None:
    if "model" in driver.options and not model_of(cell).random:
        return f"the model {model_of(cell).name} draws no random numbers"
    return "checkpoints hold no random state" if cell.option("save_only_model") else None


@check(scenario=RESUME, until=(("train", "step", 4), ("resume", "step", 1)), order=9, not_applicable=_draws_nothing)
def randomness(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that ranks drop different activations, and that a resumed run draws what the run that never stopped drew.

    Compared are torch's random states before and after the steps; a step that draws nothing says nothing.

    If it fails: seed each rank differently once the model is made, as by accelerate's
    ``set_seed(seed, device_specific=True)``. Save the random state of each rank, not that of rank 0 alone.
    """
    whole, resumed = trace.run("train"), trace.run("resume")
    for nth in range(1, SAVED):
        here = whole.at("step", nth)
        yield from every_rank(here, cell.world_size, f"step {nth + 1}")
        drawn = [after for before, after in pairs(whole.at("step", nth - 1), here) if before.rng != after.rng]
        yield from _alike(drawn, nth)
    for nth, before in enumerate((whole.at("save"), *(whole.at("step", SAVED + one) for one in (0, 1)))):
        after = resumed.at("load") if not nth else resumed.at("step", nth - 1)
        when = f"step {nth} after the load" if nth else "the load"
        yield from every_rank(after, cell.world_size, when)
        wrong = [found.rank for expected, found in pairs(before, after) if expected.rng != found.rng]
        yield from (
            f"rank {rank}: other random numbers follow {when} than in the run that never stopped" for rank in wrong
        )
        if wrong:
            return  # later ones follow from these


def _alike(drawn: list[Snapshot], nth: int) -> Iterator[str]:
    first: dict[str, int] = {}
    for snapshot in drawn:
        other = first.setdefault(snapshot.rng, snapshot.rank)
        if other != snapshot.rank:
            yield f"ranks {other} and {snapshot.rank} draw the same random numbers in step {nth + 1}"
