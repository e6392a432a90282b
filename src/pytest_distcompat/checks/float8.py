"""Do linear layers really compute in 8 bits under precision fp8?

And which breaks: 8 bits, DeepSpeed, or only both together?
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

#: How many layers a recipe may leave in more bits, the first and the last: accelerate's leaves both
#: by default.
UNCONVERTED_LAYERS = 2


def _no_float8(cell: Cell, driver: type[Driver]) -> str | None:
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
    """Return how many layers of the live model compute in 8 bits."""
    if snapshot.model is None:
        return 0
    return snapshot.model.float8


def _not_converted(snapshot: Snapshot, linears: int, action: str) -> Iterator[str]:
    """Yield a finding if more linear layers than the first and the last are not in 8 bits."""
    layers = _converted_layers(snapshot)
    if layers < max(1, linears - UNCONVERTED_LAYERS):
        finding = f"{layers} of {linears} linear layers are in 8 bits after {action}"
        yield f"rank {snapshot.rank}: {finding}; expected all but the first and the last"


def _not_computed(snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if the layers that are in 8 bits do not multiply in them."""
    layers = _converted_layers(snapshot)
    # An activation and a weight for each layer, at least; the backward pass casts more.
    if snapshot.float8 < 2 * layers:
        finding = f"{snapshot.float8} tensors were made in 8 bits in a step of {layers} such layers"
        yield f"rank {snapshot.rank}: {finding}; expected two factors of each product at least"


def _one_stage(cell: Cell, driver: type[Driver]) -> str | None:
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


#: The checks of the run in 8 bits alone, of that of DeepSpeed alone, and of that of both.
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
        name = "both"
        if stage.name != "train":
            name = stage.name.replace("_", " ")
        for finding in findings:
            yield f"{name}: {finding}"
        if findings:
            return  # later stages follow from it


def _findings_of_stage(cell: Cell, trace: Trace, stage: Run, checks: Sequence[Check]) -> list[str]:
    """Return why the run of a stage broke off, or else what these checks find in it."""
    run = trace.run(stage.name)
    if run.end:
        return [run.end.message]
    stage_trace = Trace(trace.driver, {"train": run})
    findings: list[str] = []
    for check_of_stage in checks:
        findings += check_of_stage(stage.cell(cell), stage_trace)
    return findings
