"""Does a checkpoint of one world size load at another?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat import scenario
from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.checks._base import RESHARDED, check, every_rank, finite_losses, saved_as_elsewhere
from pytest_distcompat.checks._values import differences, settings, step_counts, values
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import SAVED, Scenario
from pytest_distcompat.trace import RunTrace, Trace


def _not_by_name(cell: Cell) -> str | None:
    """Return why shards of two world sizes cannot be compared by name; None if they can."""
    if cell.option("save_only_model"):
        return "checkpoints hold the model alone: there is no training to resume"
    if not cell.option("use_orig_params"):
        return (
            "FSDP1 keeps flat parameters: they have no names by which the shards of two world sizes could be compared"
        )
    return None


def _not_resharded(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    if cell.strategy not in driver.reshards:
        return f"the driver does not claim that {cell.strategy} loads a checkpoint of another world size"
    return _not_by_name(cell) or saved_as_elsewhere(cell)


def _runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the runs ``train``, ``up``, ``back`` and ``one``, whose world sizes and meshes depend on the cell's."""
    if cell.tp == 1:
        return scenario.reshard(cell)
    # Back into as many parts as the driver can cut.
    rest, sizes = cell.without("tp").options, (int(size) for size in OPTIONS["tp"].values)
    cells = [
        Cell(cell.strategy, cell.precision, cell.world_size, (*rest, ("tp", tp)), cell.nodes)
        for tp in sizes
        if cell.world_size // cell.cp // cell.pp % tp == 0
    ]
    return scenario.reshard(cell, max(one.tp for one in cells if one == cell or not driver.unsupported_reason(one)))


_UNTIL = (("train", "step", SAVED), ("up", "save", 0), ("up", "step", 1), ("back", "step", 0), ("one", "step", 0))


@check(scenario=_runs, until=_UNTIL, order=11, not_applicable=_not_resharded, costly=True, depends_on=RESHARDED)
def reshard(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that a checkpoint loaded at another world size, or on another mesh, is bit by bit what was saved.

    The checkpoint is loaded at twice the world size, back at the first, and in one process. A tensor-parallel one is
    instead loaded without tensor parallelism, and back into the most parts; that of a pipeline by ranks with the whole
    model, and back into its stages. One more step has a finite loss.

    If it fails: what is saved by rank or padded fits no other number of ranks. Save with ``get_state_dict`` and
    torch.distributed.checkpoint (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html), or convert first,
    as DeepSpeed does (https://www.deepspeed.ai/tutorials/universal-checkpointing/).
    """
    for name, source in (("up", "train"), ("back", "up"), ("one", "train")):
        if name in trace.runs:
            yield from _changes(trace.run(source), trace.run(name))


def _changes(source: RunTrace, run: RunTrace) -> Iterator[str]:
    """Yield findings for everything that one run did not load as the other saved it."""
    ranks, cell = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks", Cell.parse(run.cell)
    ranks += "".join(f" with {name} {size}" for name, size in (("tp", cell.tp), ("pp", cell.pp)) if size > 1)
    when = f"after the load at {ranks}"
    saved, loaded = source.at("save"), run.at("load")
    yield from every_rank(saved, source.world_size, "save")
    yield from every_rank(loaded, run.world_size, f"the load at {ranks}")
    yield from differences(values(source, saved), values(run, loaded), when)
    yield from settings(saved, loaded, when)
    yield from step_counts(source, run, when)
    yield from finite_losses(run.at("step"), f"the first step {when}")
