"""Does each rank train on its own data and random numbers, and does a resumed run continue both?"""

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


def _inputs_not_observed(cell: Cell, driver: type[Driver]) -> str | None:
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
    other batches, the sampler probably restarts the epoch.
    """
    train = trace.run("train")
    resume = trace.run("resume")
    for nth in range(SAVED + 2):
        yield from _wrong_batches(cell, train, nth)
    yield from every_rank(resume.at("load"), cell.world_size, "load")
    for before, after in pairs(train.at("save"), resume.at("load")):
        if before.rng != after.rng:
            finding = "torch's random state after the load is another than at the save"
            yield f"rank {after.rank}: {finding}"
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
    """Yield findings about ranks that are wrongly fed the same batches in a step, or others."""
    step = f"step {nth + 1}"
    first_at_place: dict[int, Snapshot] = {}
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
    """Return what should differ between two ranks that share sequences; empty for other ranks."""
    if cell.dp_rank(rank) != cell.dp_rank(other):
        return ""
    return f"; expected another part of the sequence on each (cp {cell.cp})"


def _place_of_rows(cell: Cell, rank: int) -> int:
    """Return the place of a rank's rows, or parts of rows, among those of all ranks.

    Ranks with the same place share them.
    """
    ranks_of_stage = cell.world_size // cell.pp
    return rank % ranks_of_stage // cell.tp


def shared_by(cell: Cell, rank: int, other: int) -> str:
    """Return the words for what two ranks hold parts of that are fed the same."""
    if other in cell.tp_peers(rank):
        return f"parts of the same layers (tp {cell.tp})"
    if other in cell.cp_peers(rank):
        return f"parts of the same sequences (cp {cell.cp})"
    return f"stages of the same pipeline (pp {cell.pp})"


def _draws_nothing(cell: Cell, driver: type[Driver]) -> str | None:
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
    # A loader draws a seed as each epoch begins, and all ranks draw the same one: only who draws in
    # every step drops activations.
    ranks = set(range(cell.world_size))
    for snapshots_before, snapshots in itertools.pairwise(steps):
        drawing: set[int] = set()
        for before, after in pairs(snapshots_before, snapshots):
            if before.rng != after.rng:
                drawing.add(after.rank)
        ranks &= drawing
    return ranks


def _unlike_modes(run: RunTrace, steps: Sequence[Snapshots]) -> Iterator[str]:
    """Yield findings if ranks of a stage have other modules in training mode than the first.

    They are those of the first step in which this is so.
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
    """Yield findings for ranks that draw the same random numbers, but for tensor-parallel peers."""
    first_rank: dict[str, int] = {}
    for snapshot in snapshots:
        rank = snapshot.rank
        other = first_rank.setdefault(snapshot.rng, rank)
        if rank not in cell.tp_peers(other):
            finding = f"ranks {other} and {rank} draw the same random numbers in step {nth + 1}"
            yield f"{finding}{_same_rows_apart(cell, other, rank)}"


def _same_rows_apart(cell: Cell, rank: int, other: int) -> str:
    """Return what two ranks hold that are fed the same rows; empty for data parallel ranks."""
    if cell.dp_rank(rank) != cell.dp_rank(other):
        return ""
    parts = f"stages of the same pipeline (pp {cell.pp})"
    if other in cell.cp_peers(rank):
        parts = f"parts of the same sequences (cp {cell.cp})"
    return f"; expected others, as they hold {parts}"


def _wrong_dropouts(cell: Cell, snapshots: Sequence[Snapshot], nth: int) -> Iterator[str]:
    """Yield findings about what ranks drop that they must not.

    Tensor-parallel peers are compared with each other, and each rank's micro-batches.
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
        return  # what follows was made of other activations


def _repeated_dropouts(snapshot: Snapshot, nth: int) -> Iterator[str]:
    """Yield a finding for the first dropout with the mask of an earlier one, of other inputs."""
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
        name: What has happened, in words.
        expected: The snapshots of the run that never stopped.
        resumed: Those of the resumed run.
    """

    name: str
    expected: Snapshots
    resumed: Snapshots


def _other_random_states(
    cell: Cell, train: RunTrace, resume: RunTrace, drawing_ranks: set[int]
) -> Iterator[str]:
    """Yield findings for ranks that draw, and whose resumed run has another random state."""
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
            return  # later ones follow from these
