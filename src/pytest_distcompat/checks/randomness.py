"""Do ranks draw their own random numbers, and does a resumed run go on with them?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import RESUMED, check, every_rank, named_ranks, pairs
from pytest_distcompat.driver import Driver
from pytest_distcompat.models import model_of
from pytest_distcompat.scenario import RESUME, SAVED
from pytest_distcompat.trace import Snapshot, Trace


def _draws_nothing(cell: Cell, driver: type[Driver]) -> str | None:
    if "model" in driver.options and not model_of(cell).random:
        return f"the model {model_of(cell).name} draws no random numbers"
    return "checkpoints hold no random state" if cell.option("save_only_model") else None


@check(
    scenario=RESUME,
    until=(("train", "step", 4), ("resume", "step", 1)),
    order=9,
    not_applicable=_draws_nothing,
    depends_on=RESUMED,
)
def randomness(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that ranks drop different activations, and that a resumed run draws what the run that never stopped drew.

    The check compares torch's random states after each step, on ranks that draw in every step. Ranks of one
    tensor-parallel group may draw alike.

    If it fails: seed each rank differently once the model is made, as by accelerate's
    ``set_seed(seed, device_specific=True)``. Save the random state of each rank, not that of rank 0 alone.
    """
    whole, resumed = trace.run("train"), trace.run("resume")
    steps = [whole.at("step", nth) for nth in range(SAVED + 2)]
    for nth, here in enumerate(steps):
        yield from every_rank(here, cell.world_size, f"step {nth + 1}")
    # A loader draws a seed as each epoch begins, and all ranks draw the same one: only who draws in every step drops activations.
    draws = set(range(cell.world_size))
    for before, after in itertools.pairwise(steps):
        draws &= {now.rank for was, now in pairs(before, after) if was.rng != now.rng}
    if model_of(cell).random and len(draws) < cell.world_size:
        idle = named_ranks(sorted(set(range(cell.world_size)) - draws), cell.world_size)
        yield f"{idle}: a step draws no random numbers; the model {model_of(cell).name} draws some in each forward"
    for nth in range(1, SAVED):
        yield from _alike(cell, [one for one in steps[nth] if one.rank in draws], nth)
    for nth, before in enumerate((whole.at("save"), *steps[SAVED:])):
        after = resumed.at("load") if not nth else resumed.at("step", nth - 1)
        when = f"step {nth} after the load" if nth else "the load"
        yield from every_rank(after, cell.world_size, when)
        wrong = [one.rank for was, one in pairs(before, after) if was.rng != one.rng and one.rank in draws]
        yield from (
            f"rank {rank}: other random numbers follow {when} than in the run that never stopped" for rank in wrong
        )
        if wrong:
            return  # later ones follow from these


def _alike(cell: Cell, drawn: list[Snapshot], nth: int) -> Iterator[str]:
    first: dict[str, int] = {}
    for snapshot in drawn:
        other = first.setdefault(snapshot.rng, snapshot.rank)
        # Peers of tensor parallelism have the same activations, of which they must drop the same.
        if cell.dp_rank(other) != cell.dp_rank(snapshot.rank):
            yield f"ranks {other} and {snapshot.rank} draw the same random numbers in step {nth + 1}"
