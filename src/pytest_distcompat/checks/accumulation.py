"""Check ``accumulation``: several micro-batches cost one reduction of gradients and one step.

It applies to cells with ``grad_accum``, such as ``ddp-fp32-w2-grad_accum_2``: each step of the
trainer adds up the gradients of 2 micro-batches.

``judge.judge`` calls the check once both runs have ended. The trace has the run ``train`` (one
process group from start to end) and the run ``single``, the same training with one micro-batch a
step. For each rank and step there is a snapshot: what the model was fed (a digest, or hash, for
each forward pass), the collectives, and the steps of the optimizer. The check compares the numbers
of both runs and yields findings, such as ``step 1: rank 0: 2000 elements of gradients were reduced;
expected 1000 with one micro-batch``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell does not have the check, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, pairs, with_rank
from pytest_distcompat.checks._reductions import gradient_reductions
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import STEPS, TRAIN_RUN, Scenario, without
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Snapshot, Trace

#: The same training with one micro-batch a step. It is the run ``train`` of the cell without
#: ``grad_accum``, so the two cells share it (``same_as``).
SINGLE_RUN = dataclasses.replace(
    TRAIN_RUN, name="single", only=without("grad_accum"), same_as=TRAIN_RUN.name
)
_BOTH = Scenario("accumulation", (TRAIN_RUN, SINGLE_RUN))
#: The number of first steps that certainly have all micro-batches. A later step may be the last of
#: an epoch, with fewer.
FULL_STEPS = 3


def _why_nothing_accumulates(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the check does not apply to the cell; None if it does."""
    if cell.cp > 1:
        # ``gradient_reductions`` leaves out only collectives of tensor parallelism and pipelines.
        return (
            "context parallelism sums the gradients of keys and values in every micro-batch, "
            "beside which others do not show"
        )
    if cell.option("grad_accum") == 1:
        return "there is one micro-batch a step"
    return None


@check(
    scenario=_BOTH,
    until=(("train", "step", STEPS - 1), ("single", "step", FULL_STEPS - 1)),
    order=8,
    not_applicable=_why_nothing_accumulates,
)
def accumulation(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that N micro-batches a step cost one reduction of gradients and one optimizer step.

    Each micro-batch is fed once. ZeRO-2 and ZeRO-3 partition gradients and reduce N times
    (https://github.com/deepspeedai/DeepSpeed/pull/338).

    If it fails: gradients are reduced too often if ``no_sync`` or
    ``set_requires_gradient_sync(False)`` is missing or wraps another backward pass, and never if
    the last micro-batch of a short step is not recognized.
    """
    micro_batches = int(cell.option("grad_accum"))
    trained = trace.run("train")
    single = trace.run("single").at("step", FULL_STEPS - 1)
    yield from every_rank(single, cell.world_size, "three steps of one micro-batch")
    for nth in range(STEPS):
        snapshots = trained.at("step", nth)
        yield from every_rank(snapshots, cell.world_size, f"step {nth + 1}")
        is_full = nth < FULL_STEPS
        # ``once``: the snapshot of the same rank after a step of one micro-batch.
        for once, snapshot in pairs(single, snapshots):
            findings = [
                *_other_inputs(snapshot, once, micro_batches, is_full=is_full),
                *_other_optimizer_steps(snapshot, once),
            ]
            # No hook sees what a compiled graph is fed. Then the number of micro-batches is known
            # only for full steps.
            if snapshot.inputs or is_full:
                findings += _other_reductions(cell, snapshot, once, micro_batches)
            for finding in with_rank(snapshot, findings):
                yield f"step {nth + 1}: {finding}"


def _other_inputs(
    snapshot: Snapshot, once: Snapshot, micro_batches: int, *, is_full: bool
) -> Iterator[str]:
    """Yield texts if a step was not fed each of its micro-batches once.

    Args:
        snapshot: The rank's snapshot after the step.
        once: Its snapshot after a step of one micro-batch. It has several inputs if a pipeline
            feeds the micro-batch in parts.
        micro_batches: How many micro-batches a full step has.
        is_full: Whether the step is a full one; the last of an epoch may have fewer.
    """
    if not once.inputs:
        # No hook sees what a compiled graph is fed.
        return
    inputs = len(snapshot.inputs)
    without_option = len(once.inputs)
    expected = micro_batches * without_option
    if is_full and inputs != expected:
        finding = f"fed {inputs} micro-batches; expected {expected}"
        if inputs == without_option > 1:
            # A driver that does not obey the option, or a trainer that drops it.
            finding += f", as without grad_accum it is fed {without_option}"
        yield finding
    elif inputs > expected or not inputs:
        yield f"fed {inputs} micro-batches; expected {expected} at most"
    repeated = inputs - len(set(snapshot.inputs))
    if repeated:
        yield f"{repeated} of {inputs} micro-batches are one that was fed before in the same step"


def _other_optimizer_steps(snapshot: Snapshot, once: Snapshot) -> Iterator[str]:
    """Yield a text if the optimizer did not step as often as with one micro-batch."""
    steps = len(snapshot.steps)
    expected = len(once.steps)
    if steps != expected:
        yield f"the optimizer stepped {steps} times; {expected} with one micro-batch"


def _other_reductions(
    cell: Cell, snapshot: Snapshot, once: Snapshot, micro_batches: int
) -> Iterator[str]:
    """Yield a text if a step reduced more or fewer elements of gradients than expected.

    As many are expected as in a step of one micro-batch. A strategy that reduces the gradients of
    each micro-batch, as ZeRO-2 does, may reduce as many for each.
    """
    expected = _reduced_elements(cell, once)
    reduced = _reduced_elements(cell, snapshot)
    times = 1
    if STRATEGIES.get(cell.strategy).reduces_each_micro_batch:
        times = micro_batches
        if snapshot.inputs:
            # The last step of an epoch may have fewer.
            times = len(snapshot.inputs) // max(1, len(once.inputs))
    if not expected:
        return
    # Another number of reductions makes a ratio that is off by 1 or more.
    ratio = reduced / expected
    if abs(ratio - times) <= 1 / 4:
        return
    expectation = f"{expected} with one micro-batch"
    if times != 1:
        expectation = f"{times} times {expected}, once a micro-batch"
    yield f"{reduced} elements of gradients were reduced; expected {expectation}"


def _reduced_elements(cell: Cell, snapshot: Snapshot) -> int:
    """Return how many elements of gradients a rank has reduced in the step of the snapshot."""
    return sum(info.total for info in gradient_reductions(cell, snapshot))
