"""Does each rank learn from its own data, and does a resumed run go on in the middle of it?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, pairs
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import RESUME
from pytest_distcompat.trace import RunTrace, Trace


def _watched(cell: Cell, driver: type[Driver]) -> str | None:
    if cell.option("compile"):
        return "a hook that sees what the model is fed would break the graph that compile is to see"
    return "no optimizer state, so no going on" if cell.option("save_only_model") else None


@check(scenario=RESUME, until=(("train", "step", 4), ("resume", "step", 1)), order=9, not_applicable=_watched)
def data(cell: Cell, trace: Trace) -> Iterator[str]:
    """No two ranks are fed the same batch in a step. After a load the random state of torch is what it was at the save,
    and the next steps are fed what the run that never stopped was fed, though the save was in mid-epoch.

    If it fails: the same data on all ranks is training on a part of it, several times over; look at what the trainer
    believes is its world size. After a load the sampler probably starts the epoch anew.
    """
    whole, resumed = trace.run("train"), trace.run("resume")
    for nth in range(5):
        yield from _apart(whole, nth)
    yield from every_rank(resumed.at("load"), cell.world_size, "load")
    for before, after in pairs(whole.at("save"), resumed.at("load")):
        if before.rng != after.rng:
            yield f"rank {after.rank}: torch's random state after the load is another than at the save"
    for nth in (0, 1):
        yield from every_rank(whole.at("step", 3 + nth), cell.world_size, f"step {nth + 1} after the save")
        yield from every_rank(resumed.at("step", nth), cell.world_size, f"step {nth + 1} after the load")
        for expected, found in pairs(whole.at("step", 3 + nth), resumed.at("step", nth)):
            if expected.inputs != found.inputs:
                told = f"step {nth + 1} after the load is fed other data than in the run that never stopped"
                yield f"rank {found.rank}: {told}"


def _apart(run: RunTrace, nth: int) -> Iterator[str]:
    fed: dict[str, int] = {}
    for snapshot in run.at("step", nth):
        if not snapshot.inputs:
            yield f"rank {snapshot.rank}: the model was fed nothing in step {nth + 1}"
        elif "" in snapshot.inputs:
            yield f"rank {snapshot.rank}: no tensor is seen in what the model was fed in step {nth + 1}: it may be anybody's"
        for one in set(snapshot.inputs) - {""}:
            other = fed.setdefault(one, snapshot.rank)
            if other != snapshot.rank:
                yield f"ranks {other} and {snapshot.rank} are fed the same batch in step {nth + 1}"
