"""Check ``clipping``: the optimizer gets gradients of the reference's norm.

A trainer that clips by the norm of one shard, or clips twice, gives the optimizer gradients of a
wrong size. AdamW hides that for a while, so losses do not show it.

``judge.judge`` calls the check once both runs have ended; ``parity`` calls it too, where it must
know that gradients are right. It gets a cell, one point of the test matrix such as
``fsdp2-bf16_upcast-w2``, and a trace with two runs of 20 steps: ``train`` on the cell's ranks, and
``reference`` in one process in float32. For each step a rank's snapshot has the sum of squares of
the gradients that its optimizer got, after unscaling and clipping. The check yields a finding for
the first step that differs: ``step 1: all ranks together: the gradients that the optimizer gets
have norm 2; 1 in the reference (2e-04 allowed)``.

Ranks that hold one copy of the model together (a shard group, as under FSDP) have a norm together.
Under DDP each rank has a copy, so each rank has a norm.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, check
from pytest_distcompat.checks._reference import (
    WHOLE_RUNS,
    Allowance,
    allowed_deviations,
    has_reference,
    optimizer_norm,
    reference_runs,
)
from pytest_distcompat.checks._tied import tied_apart
from pytest_distcompat.model_values import (
    Names,
    across_stages,
    rounding_of,
    stages_by_parameter,
    stages_of,
)
from pytest_distcompat.trace import RunTrace, Snapshot, Trace, shard_groups, together
from pytest_distcompat.wording import named_ranks


@check(scenario=reference_runs, until=WHOLE_RUNS, order=6, not_applicable=has_reference)
def clipping(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the optimizer's gradients have the norm of the reference's, over all ranks.

    If it fails: a larger norm is not clipped, or by the norm of a shard; a smaller one is clipped
    twice, or scaled by the number of ranks. AdamW hides both for a while.
    """
    trained = trace.run("train")
    reference_run = trace.run("reference")
    # One for each step: that of the precision, or more if the run ``rounded`` shows that rounding
    # alone moves the norm further.
    tolerances = allowed_deviations(
        rounding_of(cell, trained).norm_tolerance, trace, optimizer_norm
    )
    largest = 0.0
    for step, tolerance in enumerate(tolerances):
        name = f"step {step + 1}"
        snapshots = trained.at("step", step)
        references = reference_run.at("reference", step)
        if not snapshots or not references:
            yield f"{name}: no reference to compare with"
            return
        expected = optimizer_norm(references[0])
        largest = max(largest, expected)
        # Relative to this step's norm; where that is 0, to the largest so far.
        allowance = Allowance(tolerance, largest)
        expectation = f"{expected:.6g} in the reference ({tolerance:.0e} allowed)"
        is_wrong = False
        for copy in _norms_of_copies(cell, trained, snapshots):
            if allowance.covers(copy.norm, expected):
                continue
            is_wrong = True
            ranks = named_ranks(copy.ranks, cell.world_size)
            if len(copy.ranks) > 1:
                ranks = f"{ranks} together"
            gradients = f"the gradients that the optimizer gets have norm {copy.norm:.6g}"
            finding = f"{gradients}; {expectation}{tied_apart(cell, trained)}"
            yield f"{name}: {ranks}: {finding}"
        if is_wrong:
            # Later steps follow from this one.
            return


@dataclass(frozen=True)
class _NormOfCopy:
    """The norm of all gradients that the optimizer gets, on ranks with one copy of the model.

    Attributes:
        ranks: The ranks that hold the copy together.
        norm: The norm.
    """

    ranks: tuple[int, ...]
    norm: float


def _norms_of_copies(cell: Cell, run: RunTrace, snapshots: Snapshots) -> Iterator[_NormOfCopy]:
    """Yield the norm of the gradients of each copy of the model.

    A rank reports its share of the sum of squares, and the ranks among whom the sum is shared
    (``holders``). The shares of one copy add up to the squared norm.
    """
    holders_by_rank: dict[int, tuple[int, ...]] = {}
    square_by_rank: dict[int, float] = {}
    for snapshot in snapshots:
        if snapshot.steps:
            # There are several optimizer steps in one step if the trainer has several optimizers.
            shares = [(step.holders, step.square) for step in snapshot.steps]
            holders, square = together(shares)
            holders_by_rank[snapshot.rank] = holders
            square_by_rank[snapshot.rank] = square
    # The ranks of each copy: those that hold a stage of a pipeline together, then those of the
    # other stages too.
    groups = shard_groups(holders_by_rank, cell.world_size)
    for ranks in across_stages(run, groups):
        holders_of_copy: list[Snapshot] = []
        for snapshot in snapshots:
            if snapshot.rank in ranks:
                holders_of_copy.append(snapshot)
        square = sum(square_by_rank.get(rank, 0.0) for rank in ranks)
        if not _lists_gradients(holders_of_copy) and _has_tied_stages(run):
            # What counts twice in the sum cannot be taken out of it.
            continue
        square_of_tied = _of_later_stages(run, holders_of_copy)
        yield _NormOfCopy(ranks, math.sqrt(square - square_of_tied))


def _has_tied_stages(run: RunTrace) -> bool:
    """Tell whether several stages of a pipeline have a parameter: a tied one."""
    if run.unwrapped is None:
        return False
    stages = stages_by_parameter(run, Names(run, run.unwrapped))
    return any(len(holding) > 1 for holding in stages.values())


def _lists_gradients(pipeline: list[Snapshot]) -> bool:
    """Tell whether the ranks report the gradient of each parameter: in the first steps alone."""
    return any(step.gradients for snapshot in pipeline for step in snapshot.steps)


def _of_later_stages(run: RunTrace, pipeline: list[Snapshot]) -> float:
    """Return the squares of gradients that would count twice, since two pipeline stages have them.

    Pipeline parallelism puts the layers on several ranks, in stages. A tied parameter, such as
    embedding and output layer in one, may be on the first and on the last stage. Its gradient must
    count once, as in the reference; so that of all but the earliest stage is returned.

    Args:
        run: The run.
        pipeline: The snapshots of the ranks that hold one copy of the model, of all its stages.
    """
    stage_of_rank = stages_of(run)
    if not stage_of_rank or run.unwrapped is None:
        return 0.0
    names = Names(run, run.unwrapped)
    # Parameter -> stage -> the square of its gradient there.
    squares: dict[str, dict[int, float]] = defaultdict(_zeros)
    for snapshot in pipeline:
        shares = [(step.holders, step.square) for step in snapshot.steps]
        holders, _ = together(shares)
        stage = stage_of_rank.get(snapshot.rank, 0)
        for step in snapshot.steps:
            for info in step.gradients:
                # What is subtracted must be scaled as in the total (``trace.together``): a shard
                # counts whole, a replica by this rank's part, since other ranks report the rest.
                holders_of_gradient = max(1, len(info.layout.holders))
                part = info.square * holders_of_gradient / max(1, len(holders))
                squares[names(info.name)][stage] += part
    squares_of_later: list[float] = []
    for square_by_stage in squares.values():
        earliest = min(square_by_stage)
        all_stages = sum(square_by_stage.values())
        squares_of_later.append(all_stages - square_by_stage[earliest])
    return sum(squares_of_later)


def _zeros() -> dict[int, float]:
    """Return a dict by stage in which each number begins at 0."""
    return defaultdict(float)
