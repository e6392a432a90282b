"""Checks ``float8`` (layers compute in 8 bits) and ``stages`` (8 bits, DeepSpeed, or both).

Both apply to cells of precision ``fp8``. A cell is one point of the test matrix, such as
``zero2-fp8-w2`` (strategy, precision, 2 ranks). A trainer that finds no layer to convert does not
complain, and computes in bfloat16.

- ``float8``: linear layers are converted, and multiply in 8 bits.
- ``stages``: if DeepSpeed and 8 bits fail together, does one of them fail alone?

``judge.judge`` calls a check once its runs have ended, with the cell and a trace: for each run (one
process group from start to end), rank and action a snapshot, with the number of layers that compute
in 8 bits and of tensors that a step made in 8 bits. The check yields findings, such as ``rank 0: 0
of 9 linear layers are in 8 bits after build; expected all but the first and the last``.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell of a driver (the class by which a trainer is
tested) does not have the check, or None; ``raises`` names runs whose exceptions the check itself
judges, so that only a crash or a hang is a verdict at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Check, check, every_rank
from pytest_distcompat.checks.active import active
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import STAGES, TRAIN, Run
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Snapshot, Trace

#: How many layers may stay unconverted: the first and the last, which accelerate's recipe leaves
#: out by default.
UNCONVERTED_LAYERS = 2


def _no_float8(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why ``float8`` does not apply to a cell; None if it does."""
    if not PRECISIONS.get(cell.precision).float8:
        return f"{cell.precision} has no 8-bit layers"
    return None


@check(scenario=TRAIN, until=(("train", "step", 2),), order=18, not_applicable=_no_float8)
def float8(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that linear layers are converted to 8 bits and compute in them.

    Every rank converts all linear layers whose sizes 16 divides, except perhaps the first and the
    last. The loss is finite.

    If it fails: a conversion that finds no layer is silent, and the run is plain bfloat16
    (https://github.com/huggingface/accelerate/issues/3360). Try 8 bits alone, DeepSpeed alone, then
    both.
    """
    run = trace.run()
    if run.unwrapped is None or not run.unwrapped.linears:
        yield (
            "the unwrapped model has no linear layer whose sizes 16 divides: "
            "there is nothing to convert"
        )
        return
    built = run.at("build")
    trained = run.at("step", 2)
    yield from every_rank(built, cell.world_size, "build")
    for snapshot in built:
        yield from _not_converted(snapshot, run.unwrapped.linears, "build")
    yield from every_rank(trained, cell.world_size, "three steps")
    for snapshot in trained:
        yield from _not_converted(snapshot, run.unwrapped.linears, "three steps")
    # Transformer Engine casts in its own kernels, and no hook sees inside a compiled graph.
    casts_are_seen = cell.option("fp8_backend") == "torchao" and not cell.option("compile")
    for snapshot in trained:
        if snapshot.loss is None or not math.isfinite(snapshot.loss):
            yield f"rank {snapshot.rank}: the loss is {snapshot.loss}; expected a number"
        if casts_are_seen:
            yield from _not_computed(snapshot)


def _converted_layers(snapshot: Snapshot) -> int:
    """Return how many layers of a rank's model are converted; 0 if it has no model."""
    if snapshot.model is None:
        return 0
    return snapshot.model.float8


def _not_converted(snapshot: Snapshot, linears: int, action: str) -> Iterator[str]:
    """Yield a finding if a rank has converted too few of its linear layers.

    Args:
        snapshot: The rank's snapshot.
        linears: The number of linear layers that can be converted (16 divides their sizes).
        action: The words for what came before: ``build``.
    """
    layers = _converted_layers(snapshot)
    if layers < max(1, linears - UNCONVERTED_LAYERS):
        finding = f"{layers} of {linears} linear layers are in 8 bits after {action}"
        yield f"rank {snapshot.rank}: {finding}; expected all but the first and the last"


def _not_computed(snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if a step made too few tensors in 8 bits for its converted layers."""
    layers = _converted_layers(snapshot)
    # An activation and a weight for each layer, at least; the backward pass casts more.
    if snapshot.float8 < 2 * layers:
        finding = f"{snapshot.float8} tensors were made in 8 bits in a step of {layers} such layers"
        yield f"rank {snapshot.rank}: {finding}; expected two factors of each product at least"


def _one_stage(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why ``stages`` does not apply to a cell; None if it does.

    A stage is a run with 8 bits, with DeepSpeed, or with both.
    """
    if (
        not PRECISIONS.get(cell.precision).float8
        or STRATEGIES.get(cell.strategy).zero_stage is None
    ):
        return "8 bits and DeepSpeed are not used together"
    for run in STAGES.runs:
        reason = driver.unsupported_reason(run.cell(cell))
        if reason:
            return f"a stage alone cannot run: {reason}"
    return None


#: The checks of each run of ``STAGES``: 8 bits alone, DeepSpeed alone, both together.
CHECKS_OF_STAGES: Sequence[Sequence[Check]] = [[float8], [active], [float8, active]]


@check(
    scenario=STAGES,
    until=(),
    order=18,
    not_applicable=_one_stage,
    raises=tuple(run.name for run in STAGES.runs),
)
def stages(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that 8 bits alone (under FSDP2), DeepSpeed alone and both together run as asked.

    The verdict names the first stage that breaks, and what ``float8`` or ``active`` finds in it.

    If it fails: see ``float8`` for the first stage, ``active`` for the second. Where only both
    together break, the trainer decides about 8 bits by a precision that DeepSpeed has changed
    (https://github.com/huggingface/accelerate/issues/3360).
    """
    for stage, checks in zip(STAGES.runs, CHECKS_OF_STAGES, strict=True):
        findings = _findings_of_stage(cell, trace, stage, checks)
        # The last run, with both, is the cell's own training; another is named ``fp8_alone``, say.
        name = "both"
        if stage.name != "train":
            name = stage.name.replace("_", " ")
        for finding in findings:
            yield f"{name}: {finding}"
        if findings:
            # Both together cannot run if one of them cannot.
            return


def _findings_of_stage(cell: Cell, trace: Trace, stage: Run, checks: Sequence[Check]) -> list[str]:
    """Return why the run of a stage failed, or else what the checks find in it."""
    run = trace.run(stage.name)
    if run.end:
        return [run.end.message]
    # The checks read the run ``train``.
    stage_trace = Trace(trace.driver, {"train": run})
    findings: list[str] = []
    for check_of_stage in checks:
        findings += check_of_stage(stage.cell(cell), stage_trace)
    return findings
