"""Does gradient accumulation reduce gradients, and step the optimizer, once a step?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, gradient_reductions, pairs
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import STEPS, TRAIN_RUN, Scenario, without
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Snapshot, Trace

#: The same training with one micro-batch a step; it is the run of the cell without the option.
SINGLE_RUN = dataclasses.replace(TRAIN_RUN, name="single", only=without("grad_accum"), same_as=TRAIN_RUN.name)
_BOTH = Scenario("accumulation", (TRAIN_RUN, SINGLE_RUN))
#: The first steps, which cannot be the end of an epoch, where a step may have fewer micro-batches.
FULL_STEPS = 3


def _accumulates(cell: Cell, driver: type[Driver]) -> str | None:
    if cell.cp > 1:
        return "context parallelism sums the gradients of keys and values in every micro-batch, beside which others do not show"
    return None if cell.option("grad_accum") != 1 else "there is one micro-batch a step"


@check(
    scenario=_BOTH,
    until=(("train", "step", STEPS - 1), ("single", "step", FULL_STEPS - 1)),
    order=8,
    not_applicable=_accumulates,
)
def accumulation(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that N micro-batches a step cost one reduction of gradients and one optimizer step.

    Each micro-batch is fed once. ZeRO-2 and ZeRO-3 partition gradients and reduce N times
    (https://github.com/deepspeedai/DeepSpeed/pull/338).

    If it fails: gradients are reduced too often if ``no_sync`` or ``set_requires_gradient_sync(False)`` is missing or
    wraps another backward pass, and never if the last micro-batch of a short step is not recognized.
    """
    many = int(cell.option("grad_accum"))
    trained, alone = trace.run("train"), trace.run("single").at("step", FULL_STEPS - 1)
    every_micro_batch = STRATEGIES.get(cell.strategy).reduces_each_micro_batch
    yield from every_rank(alone, cell.world_size, "three steps of one micro-batch")
    for nth in range(STEPS):
        snapshots = trained.at("step", nth)
        yield from every_rank(snapshots, cell.world_size, f"step {nth + 1}")
        for once, snapshot in pairs(tuple(alone), snapshots):
            found = [*_fed(snapshot, once, many, full=nth < FULL_STEPS)]
            if len(snapshot.steps) != len(once.steps):
                found.append(
                    f"the optimizer stepped {len(snapshot.steps)} times; {len(once.steps)} with one micro-batch"
                )
            if snapshot.inputs or nth < FULL_STEPS:
                # Inside a compiled graph no hook sees the inputs.
                micros = (len(snapshot.inputs) // max(1, len(once.inputs))) if snapshot.inputs else many
                found += _reduced(cell, snapshot, once, micros if every_micro_batch else 1)
            yield from (f"step {nth + 1}: rank {snapshot.rank}: {text}" for text in found)


def _fed(snapshot: Snapshot, alone: Snapshot, many: int, *, full: bool) -> Iterator[str]:
    if not alone.inputs:
        return
    most, fed, different = many * len(alone.inputs), len(snapshot.inputs), len(set(snapshot.inputs))
    if fed > most or not fed or (full and fed < most):
        yield f"fed {fed} micro-batches; expected {most}{'' if full else ' at most'}"
    if different < fed:
        yield f"{fed - different} of {fed} micro-batches are one that was fed before in the same step"


def _reduced(cell: Cell, snapshot: Snapshot, alone: Snapshot, times: int) -> Iterator[str]:
    once, found = (sum(info.total for info in gradient_reductions(cell, one)) for one in (alone, snapshot))
    if once and abs(found / once - times) > 1 / 4:
        expected = f"{once} with one micro-batch" if times == 1 else f"{times} times {once}, once a micro-batch"
        yield f"{found} elements of gradients were reduced; expected {expected}"
