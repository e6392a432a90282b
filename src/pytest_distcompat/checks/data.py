"""Does each rank train on its own data and random numbers, and does a resumed run continue where it stopped?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import RESUMED, UNTIL_RESUMED, check, every_rank, named_ranks, other_mode, pairs
from pytest_distcompat.checks._values import by_stage
from pytest_distcompat.driver import Driver
from pytest_distcompat.models import model_of
from pytest_distcompat.scenario import RESUME, SAVED
from pytest_distcompat.trace import RunTrace, Snapshot, Trace


def _inputs_not_observed(cell: Cell, driver: type[Driver]) -> str | None:
    if cell.option("compile"):
        return "a hook that sees what the model is fed would break the graph that compile is to see"
    return "checkpoints hold no optimizer state, so training cannot resume" if cell.option("save_only_model") else None


@check(scenario=RESUME, until=UNTIL_RESUMED, order=9, not_applicable=_inputs_not_observed, depends_on=RESUMED)
def data(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that ranks are fed different batches, and that a resumed run continues in the middle of the epoch.

    torch's random state continues too. Ranks of one tensor-parallel group or of one pipeline are fed the same batches;
    those of one context-parallel group a part each of the same sequences.

    If it fails: for equal batches check which world size the trainer assumes. If a load leads to other batches, the
    sampler probably restarts the epoch.
    """
    whole, resumed = trace.run("train"), trace.run("resume")
    for nth in range(5):
        yield from _apart(cell, whole, nth)
    yield from every_rank(resumed.at("load"), cell.world_size, "load")
    for before, after in pairs(whole.at("save"), resumed.at("load")):
        if before.rng != after.rng:
            yield f"rank {after.rank}: torch's random state after the load is another than at the save"
    for nth in (0, 1):
        yield from every_rank(whole.at("step", 3 + nth), cell.world_size, f"step {nth + 1} after the save")
        yield from every_rank(resumed.at("step", nth), cell.world_size, f"step {nth + 1} after the load")
        for expected, found in pairs(whole.at("step", 3 + nth), resumed.at("step", nth)):
            if expected.inputs != found.inputs:
                finding = f"step {nth + 1} after the load is fed other data than in the run that never stopped"
                yield f"rank {found.rank}: {finding}"


def _apart(cell: Cell, run: RunTrace, nth: int) -> Iterator[str]:
    # The place of a rank's rows among those of all ranks.
    places = {rank: rank % (cell.world_size // cell.pp) // cell.tp for rank in range(cell.world_size)}
    fed: dict[str, int] = {}
    first: dict[int, Snapshot] = {}
    for snapshot in run.at("step", nth):
        if not snapshot.inputs:
            yield f"rank {snapshot.rank}: the model was fed nothing in step {nth + 1}"
        elif "" in snapshot.inputs:
            yield f"rank {snapshot.rank}: no tensor was found in the inputs of step {nth + 1}, so ranks cannot be compared"
        peer = first.setdefault(places[snapshot.rank], snapshot)
        if peer.inputs != snapshot.inputs:
            layers, stages = f"parts of the same layers (tp {cell.tp})", f"stages of the same pipeline (pp {cell.pp})"
            shared = layers if snapshot.rank in cell.tp_peers(peer.rank) else stages
            finding = f"ranks {peer.rank} and {snapshot.rank} are fed different batches in step {nth + 1}"
            yield f"{finding}; expected the same, as they hold {shared}"
        for batch in set(snapshot.inputs) - {""}:
            other = fed.setdefault(batch, snapshot.rank)
            if places[other] != places[snapshot.rank]:
                alike = cell.dp_rank(other) == cell.dp_rank(snapshot.rank)
                expected = f"; expected another part of the sequence on each (cp {cell.cp})" if alike else ""
                yield f"ranks {other} and {snapshot.rank} are fed the same batch in step {nth + 1}{expected}"


def _draws_nothing(cell: Cell, driver: type[Driver]) -> str | None:
    if "model" in driver.options and not model_of(cell).random:
        return f"the model {model_of(cell).name} draws no random numbers"
    return "checkpoints hold no random state" if cell.option("save_only_model") else None


@check(scenario=RESUME, until=UNTIL_RESUMED, order=9, not_applicable=_draws_nothing, depends_on=RESUMED)
def randomness(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that ranks drop different activations, and that a resumed run draws what the run that never stopped drew.

    The check compares torch's random states after each step, on ranks that draw in every step: no two may be alike, but of
    ranks of one tensor-parallel group. These drop the same of the same activations and, as under sequence parallelism, not
    the same of different ones; no rank drops the same of two micro-batches. That is read from modules ``torch.nn.Dropout``.
    All ranks have the same modules in training mode.

    If it fails: seed each rank differently once the model is made, as by accelerate's
    ``set_seed(seed, device_specific=True)``, and ranks of one tensor-parallel group alike, unless each has a part of the
    sequence. Save the random state of each rank, not that of rank 0 alone.
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
    yield from _modes(whole, steps)
    for nth in range(1, SAVED):
        drawn = [one for one in steps[nth] if one.rank in draws]
        yield from _alike(cell, drawn, nth)
        yield from _dropped(cell, drawn, nth)
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


def _modes(run: RunTrace, steps: Sequence[tuple[Snapshot, ...]]) -> Iterator[str]:
    """Yield findings of the first step in which ranks with the same modules do not train the same ones."""
    for nth in range(1, SAVED):
        found = [
            text
            for (first, *others), _ in by_stage(run, steps[nth])
            for one in others
            for text in other_mode(first, one, f"step {nth + 1}", f"on rank {first.rank}")
        ]
        yield from found
        if found:
            return


def _alike(cell: Cell, drawn: list[Snapshot], nth: int) -> Iterator[str]:
    first: dict[str, int] = {}
    for snapshot in drawn:
        other = first.setdefault(snapshot.rng, snapshot.rank)
        if snapshot.rank not in cell.tp_peers(other):
            finding = f"ranks {other} and {snapshot.rank} draw the same random numbers in step {nth + 1}"
            yield f"{finding}{_apart_on(cell, other, snapshot.rank)}"


def _apart_on(cell: Cell, one: int, other: int) -> str:
    """Return what two ranks hold that are fed the same rows; empty for data parallel ranks."""
    if cell.dp_rank(one) != cell.dp_rank(other):
        return ""
    parts = f"parts of the same sequences (cp {cell.cp})"
    held = parts if other in cell.cp_peers(one) else f"stages of the same pipeline (pp {cell.pp})"
    return f"; expected others, as they hold {held}"


def _dropped(cell: Cell, drawn: list[Snapshot], nth: int) -> Iterator[str]:
    """Yield a finding for what peers of tensor parallelism must not drop, and for micro-batches of which the same is dropped."""
    peers: dict[int, Snapshot] = {}
    for snapshot in drawn:
        first = peers.setdefault(cell.tp_peers(snapshot.rank)[0], snapshot)
        ranks = f"ranks {first.rank} and {snapshot.rank}"
        for one, other in zip(first.dropouts, snapshot.dropouts, strict=False):
            # What follows the first difference was made of other activations.
            given = "the same" if one.input == other.input else "different"
            drop, expected = ("the same", "others") if one.zeros == other.zeros else ("others", "the same")
            if (one.input == other.input) != (one.zeros == other.zeros):
                where = f"in step {nth + 1} ({one.name}); expected {expected} (tp {cell.tp})"
                yield f"{ranks} drop {drop} of {given} activations {where}"
                break
        inputs: dict[str, str] = {}
        for one in snapshot.dropouts:
            if inputs.setdefault(one.zeros, one.input) != one.input:
                yield f"rank {snapshot.rank} drops the same of different activations in step {nth + 1} ({one.name})"
                break
