"""Check ``data``: ranks are fed different batches, and a resumed run continues its epoch.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``ddp-fp32-w2`` (strategy, precision, 2 ranks), and a trace with two runs (a run is
one process group from start to end): ``train`` takes three steps, saves, and goes on; ``resume``
loads that checkpoint and repeats the next two steps. For each rank and step the trace has a
snapshot with digests of the batches that the model was fed, one for each forward pass. A digest is
a hash; it is empty if no tensor was found in the inputs. The check yields findings, such as ``ranks
0 and 1 are fed the same batch in step 1``.

Some ranks must be fed the same rows, because they hold parts of one model: those of a
tensor-parallel group (``tp``: parts of each layer) and those of a pipeline (``pp``: some of the
layers). Ranks of a context-parallel group (``cp``) are fed parts of the same sequences.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell of a driver (the class by which a trainer is
tested) does not have the check, or None; ``depends_on`` has the facets of a cell (precision,
options, ...) on which the outcome depends, so that of cells with equal facets the default profile
tests only one.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    RESUMED,
    UNTIL_RESUMED,
    check,
    every_rank,
    pairs,
    resume_runs,
)
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import SAVED
from pytest_distcompat.trace import RunTrace, Snapshot, Trace


def _inputs_not_observed(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why a cell does not have the check; None if it has."""
    if cell.option("compile"):
        return "a hook that sees what the model is fed would break the graph that compile is to see"
    if cell.option("save_only_model"):
        return "checkpoints hold no optimizer state, so training cannot resume"
    return None


@check(
    scenario=resume_runs,
    until=UNTIL_RESUMED,
    order=9,
    not_applicable=_inputs_not_observed,
    depends_on=RESUMED,
)
def data(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that ranks are fed different batches, and that a resumed run continues its epoch.

    It does so in the middle of the epoch, and torch's random state continues too. Ranks of one
    tensor-parallel group or of one pipeline are fed the same batches; those of one context-parallel
    group a part each of the same sequences.

    If it fails: for equal batches check which world size the trainer assumes. If a load leads to
    other batches, the sampler probably restarts the epoch. Save torch's random state on each rank,
    even if nothing seems to draw: the iterator of a ``DataLoader`` does as each epoch begins.
    """
    train = trace.run("train")
    resume = trace.run("resume")
    # ``SAVED`` is 3, the number of steps before the save.
    for nth in range(SAVED + 2):
        yield from _wrong_batches(cell, train, nth)
    # ``every_rank`` yields a finding if a rank has no snapshot, ``pairs`` the two snapshots of each
    # rank that has both.
    yield from every_rank(resume.at("load"), cell.world_size, "load")
    for before, after in pairs(train.at("save"), resume.at("load")):
        if before.rng != after.rng:
            finding = "torch's random state after the load is another than at the save"
            yield f"rank {after.rank}: {finding}"
    # The two steps after the save, and after the load.
    for nth in (0, 1):
        step = f"step {nth + 1}"
        expected = train.at("step", SAVED + nth)
        resumed = resume.at("step", nth)
        yield from every_rank(expected, cell.world_size, f"{step} after the save")
        yield from every_rank(resumed, cell.world_size, f"{step} after the load")
        for before, after in pairs(expected, resumed):
            if before.inputs != after.inputs:
                fed = f"{step} after the load is fed other data"
                yield f"rank {after.rank}: {fed} than in the run that never stopped"


def _wrong_batches(cell: Cell, run: RunTrace, nth: int) -> Iterator[str]:
    """Yield findings about ranks that are wrongly fed the same batch, or wrongly different ones.

    ``nth`` is the number of the step, from 0.
    """
    step = f"step {nth + 1}"
    # Place of rows (see ``_place_of_rows``) -> the snapshot of the first rank with that place.
    first_at_place: dict[int, Snapshot] = {}
    # Digest of a batch -> the first rank that was fed it.
    first_rank_of_batch: dict[str, int] = {}
    for snapshot in run.at("step", nth):
        rank = snapshot.rank
        if not snapshot.inputs:
            yield f"rank {rank}: the model was fed nothing in {step}"
        elif "" in snapshot.inputs:
            finding = f"no tensor was found in the inputs of {step}, so ranks cannot be compared"
            yield f"rank {rank}: {finding}"
        peer = first_at_place.setdefault(_place_of_rows(cell, rank), snapshot)
        if peer.inputs != snapshot.inputs:
            finding = f"ranks {peer.rank} and {rank} are fed different batches in {step}"
            yield f"{finding}; expected the same, as they hold {shared_by(cell, peer.rank, rank)}"
        for batch in set(snapshot.inputs) - {""}:
            other = first_rank_of_batch.setdefault(batch, rank)
            if _place_of_rows(cell, other) != _place_of_rows(cell, rank):
                shared = f"ranks {other} and {rank} are fed the same batch in {step}"
                yield f"{shared}{_other_parts(cell, other, rank)}"


def _other_parts(cell: Cell, rank: int, other: int) -> str:
    """Return the words for what must differ between two ranks that share sequences.

    The text is empty for ranks that do not share sequences.
    """
    if cell.dp_rank(rank) != cell.dp_rank(other):
        return ""
    return f"; expected another part of the sequence on each (cp {cell.cp})"


def _place_of_rows(cell: Cell, rank: int) -> int:
    """Return a number that is equal for ranks that must be fed the same, and differs for others.

    With ``tp=2`` on 4 ranks it is 0, 0, 1, 1. Ranks are numbered with ``pp`` as the outermost and
    ``tp`` as the innermost dimension of the mesh.
    """
    ranks_of_stage = cell.world_size // cell.pp
    return rank % ranks_of_stage // cell.tp


def shared_by(cell: Cell, rank: int, other: int) -> str:
    """Return why two ranks must be fed the same rows: ``parts of the same layers (tp 2)``."""
    if other in cell.tp_peers(rank):
        return f"parts of the same layers (tp {cell.tp})"
    if other in cell.cp_peers(rank):
        return f"parts of the same sequences (cp {cell.cp})"
    return f"stages of the same pipeline (pp {cell.pp})"
