"""Check ``randomness``: ranks draw different random numbers, and a resumed run draws on as before.

It applies to models that draw random numbers, mostly for dropout. If two ranks drop the same
activations, they see less of the data than they should.

``judge.judge`` calls the check once both runs have ended. It gets a cell, one point of the test
matrix such as ``ddp-fp32-w2-model_dropout``, and a trace with two runs (a run is one process group
from start to end): ``train`` takes three steps, saves, and goes on; ``resume`` loads that
checkpoint and repeats the next two steps. For each rank and step the trace has a snapshot with

- ``rng``, a digest (hash) of torch's random states after the step;
- ``dropouts``, for each forward of a ``torch.nn.Dropout`` a digest of its input and one of where
  it put zeros;
- the modules in evaluation mode, which drop nothing.

The check yields findings, such as ``ranks 0 and 1 draw the same random numbers in step 2``.

Tensor-parallel peers (``tp``) hold parts of the same layers. They must drop the same of equal
activations, so they may draw alike.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None;
``depends_on`` has the facets of a cell (precision, options, ...) on which the outcome depends, so
that of cells with equal facets the default profile tests only one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    RESUMED,
    UNTIL_RESUMED,
    Snapshots,
    check,
    every_rank,
    other_mode,
    pairs,
    resume_runs,
)
from pytest_distcompat.driver import Driver
from pytest_distcompat.model_values import by_stage
from pytest_distcompat.models import known_model, model_of
from pytest_distcompat.scenario import SAVED
from pytest_distcompat.trace import RunTrace, Snapshot, Trace
from pytest_distcompat.wording import named_ranks


def _draws_nothing(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    if "model" in driver.options and not model_of(cell).random:
        return f"the model {model_of(cell).name} draws no random numbers"
    if cell.option("save_only_model"):
        return "checkpoints hold no random state"
    return None


@check(
    scenario=resume_runs,
    until=UNTIL_RESUMED,
    order=9,
    not_applicable=_draws_nothing,
    depends_on=RESUMED,
)
def randomness(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that ranks drop different activations, and that a resumed run draws on as before.

    It draws what the run that never stopped drew. The check compares torch's random states after
    each step, on ranks that draw in every step: no two may be alike, but of ranks of one
    tensor-parallel group. These drop the same of the same activations and, as under sequence
    parallelism, not the same of different ones; no rank drops the same of two micro-batches. That
    is read from modules ``torch.nn.Dropout``. All ranks have the same modules in training mode.

    If it fails: seed each rank differently once the model is made, as by accelerate's
    ``set_seed(seed, device_specific=True)``, and ranks of one tensor-parallel group alike, unless
    each has a part of the sequence. Save the random state of each rank, not that of rank 0 alone.
    """
    train = trace.run("train")
    resume = trace.run("resume")
    steps = [train.at("step", nth) for nth in range(SAVED + 2)]
    for nth, snapshots in enumerate(steps):
        yield from every_rank(snapshots, cell.world_size, f"step {nth + 1}")
    drawing_ranks = _ranks_that_draw(cell, steps)
    idle_ranks = set(range(cell.world_size)) - drawing_ranks
    # None if the driver has a model of its own, of which nothing is known.
    model = known_model(cell)
    if model is not None and model.random and idle_ranks:
        ranks = named_ranks(sorted(idle_ranks), cell.world_size)
        expected = f"the model {model.name} draws some in each forward"
        yield f"{ranks}: a step draws no random numbers; {expected}"
    yield from _unlike_modes(train, steps)
    for nth in range(1, SAVED):
        drawing: list[Snapshot] = []
        for snapshot in steps[nth]:
            if snapshot.rank in drawing_ranks:
                drawing.append(snapshot)
        yield from _same_random_states(cell, drawing, nth)
        yield from _wrong_dropouts(cell, drawing, nth)
    yield from _other_random_states(cell, train, resume, drawing_ranks)


def _ranks_that_draw(cell: Cell, steps: Sequence[Snapshots]) -> set[int]:
    """Return the ranks whose random state changes in every step but the first."""
    # A loader draws a seed as each epoch begins, the same on all ranks. So only a rank that draws
    # in every step drops activations.
    ranks = set(range(cell.world_size))
    for snapshots_before, snapshots in itertools.pairwise(steps):
        drawing: set[int] = set()
        for before, after in pairs(snapshots_before, snapshots):
            if before.rng != after.rng:
                drawing.add(after.rank)
        ranks &= drawing
    return ranks


def _unlike_modes(run: RunTrace, steps: Sequence[Snapshots]) -> Iterator[str]:
    """Yield findings if ranks have other modules in training mode than the first rank.

    Ranks of one pipeline stage are compared, as stages have other modules. Only the first step with
    findings is reported.
    """
    for nth in range(1, SAVED):
        step = f"step {nth + 1}"
        findings: list[str] = []
        for snapshots, _ in by_stage(run, steps[nth]):
            for snapshot in snapshots[1:]:
                first = snapshots[0]
                findings += other_mode(first, snapshot, step, f"on rank {first.rank}")
        yield from findings
        if findings:
            return


def _same_random_states(cell: Cell, snapshots: Sequence[Snapshot], nth: int) -> Iterator[str]:
    """Yield findings for ranks that draw alike in a step, unless they are tensor-parallel peers.

    ``nth`` is the number of the step, from 0.
    """
    # Digest of random states -> the first rank that has it.
    first_rank: dict[str, int] = {}
    for snapshot in snapshots:
        rank = snapshot.rank
        other = first_rank.setdefault(snapshot.rng, rank)
        if rank not in cell.tp_peers(other):
            finding = f"ranks {other} and {rank} draw the same random numbers in step {nth + 1}"
            yield f"{finding}{_same_rows_apart(cell, other, rank)}"


def _same_rows_apart(cell: Cell, rank: int, other: int) -> str:
    """Return the words for why two ranks that are fed the same rows must draw other numbers.

    The text is empty for ranks that are fed different rows.
    """
    if cell.dp_rank(rank) != cell.dp_rank(other):
        return ""
    parts = f"stages of the same pipeline (pp {cell.pp})"
    if other in cell.cp_peers(rank):
        parts = f"parts of the same sequences (cp {cell.cp})"
    return f"; expected others, as they hold {parts}"


def _wrong_dropouts(cell: Cell, snapshots: Sequence[Snapshot], nth: int) -> Iterator[str]:
    """Yield findings about dropouts of a step that must be equal and are not, or vice versa.

    Each rank is compared with the first of its tensor-parallel peers, and the micro-batches of a
    rank are compared with each other.
    """
    first_of_peers: dict[int, Snapshot] = {}
    for snapshot in snapshots:
        first = first_of_peers.setdefault(cell.tp_peers(snapshot.rank)[0], snapshot)
        yield from _unlike_peer_dropouts(cell, first, snapshot, nth)
        yield from _repeated_dropouts(snapshot, nth)


def _unlike_peer_dropouts(
    cell: Cell, first: Snapshot, snapshot: Snapshot, nth: int
) -> Iterator[str]:
    """Yield a finding for the first dropout whose masks on two tensor-parallel peers are wrong.

    Masks must be the same for the same activations, and differ for different ones.
    """
    ranks = f"ranks {first.rank} and {snapshot.rank}"
    for dropout, peer_dropout in zip(snapshot.dropouts, first.dropouts, strict=False):
        is_same_input = dropout.input == peer_dropout.input
        drops_same = dropout.zeros == peer_dropout.zeros
        if is_same_input == drops_same:
            continue
        dropped = "the same of different activations"
        expected = "expected others"
        if is_same_input:
            dropped = "others of the same activations"
            expected = "expected the same"
        where = f"in step {nth + 1} ({peer_dropout.name})"
        finding = f"{dropped} {where}; {expected}"
        yield f"{ranks} drop {finding} (tp {cell.tp})"
        # Later dropouts get other activations because of it.
        return


def _repeated_dropouts(snapshot: Snapshot, nth: int) -> Iterator[str]:
    """Yield a finding for the first dropout that repeats the mask of an earlier one.

    A repeated mask is right if the input is the same: activations may be computed again.
    """
    # Mask -> the input that it was first used for.
    input_of_zeros: dict[str, str] = {}
    for dropout in snapshot.dropouts:
        if input_of_zeros.setdefault(dropout.zeros, dropout.input) != dropout.input:
            where = f"in step {nth + 1} ({dropout.name})"
            yield f"rank {snapshot.rank} drops the same of different activations {where}"
            return


@dataclass(frozen=True)
class _Moment:
    """A moment of the resumed run, and the same moment of the run that never stopped.

    Attributes:
        name: The moment in words: ``the load`` or ``step 1 after the load``.
        expected: The snapshots of the run that never stopped.
        resumed: The snapshots of the resumed run.
    """

    name: str
    expected: Snapshots
    resumed: Snapshots


def _other_random_states(
    cell: Cell, train: RunTrace, resume: RunTrace, drawing_ranks: set[int]
) -> Iterator[str]:
    """Yield findings for ranks whose random state in the resumed run is not as expected.

    Ranks that draw nothing do not matter. Only the first moment with findings is reported.
    """
    moments = [_Moment("the load", train.at("save"), resume.at("load"))]
    for nth in range(2):
        name = f"step {nth + 1} after the load"
        expected = train.at("step", SAVED + nth)
        resumed = resume.at("step", nth)
        moments.append(_Moment(name, expected, resumed))
    for moment in moments:
        yield from every_rank(moment.resumed, cell.world_size, moment.name)
        is_wrong = False
        for before, after in pairs(moment.expected, moment.resumed):
            if before.rng != after.rng and after.rank in drawing_ranks:
                is_wrong = True
                follow = f"other random numbers follow {moment.name}"
                yield f"rank {after.rank}: {follow} than in the run that never stopped"
        if is_wrong:
            return
