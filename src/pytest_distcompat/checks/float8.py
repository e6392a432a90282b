"""Do linear layers really compute in 8 bits under precision fp8, and which of 8 bits, DeepSpeed and both together breaks?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Check, check, every_rank
from pytest_distcompat.checks.active import active
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import STAGES, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Trace

#: How many layers a recipe may leave in more bits, the first and the last: accelerate's leaves both by default.
UNCONVERTED_LAYERS = 2


def _no_float8(cell: Cell, driver: type[Driver]) -> str | None:
    return None if PRECISIONS.get(cell.precision).float8 else f"{cell.precision} has no 8-bit layers"


@check(scenario=TRAIN, until=(("train", "step", 2),), order=18, not_applicable=_no_float8)
def float8(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that linear layers are converted to 8 bits and compute in them.

    Every rank converts all linear layers whose sizes 16 divides, except perhaps the first and the last. The loss is
    finite.

    If it fails: a conversion that finds no layer is silent, and the run is plain bfloat16
    (https://github.com/huggingface/accelerate/issues/3360). Try 8 bits alone, DeepSpeed alone, then both.
    """
    run = trace.run()
    linears = run.unwrapped.linears if run.unwrapped else 0
    if not linears:
        yield "the unwrapped model has no linear layer whose sizes 16 divides: there is nothing to convert"
        return
    for action, snapshots in (("build", run.at("build")), ("three steps", run.at("step", 2))):
        yield from every_rank(snapshots, cell.world_size, action)
        for snapshot in snapshots:
            found = snapshot.model.float8 if snapshot.model else 0
            if found < max(1, linears - UNCONVERTED_LAYERS):
                finding = f"{found} of {linears} linear layers are in 8 bits after {action}"
                yield f"rank {snapshot.rank}: {finding}; expected all but the first and the last"
    # Transformer Engine casts in its own kernels, and no hook sees inside a compiled graph.
    observed = cell.option("fp8_backend") == "torchao" and not cell.option("compile")
    for snapshot in run.at("step", 2):
        if snapshot.loss is None or not math.isfinite(snapshot.loss):
            yield f"rank {snapshot.rank}: the loss is {snapshot.loss}; expected a number"
        layers = snapshot.model.float8 if snapshot.model else 0
        # An activation and a weight for each layer, at least; the backward pass casts more.
        if observed and snapshot.float8 < 2 * layers:
            finding = f"{snapshot.float8} tensors were made in 8 bits in a step of {layers} such layers"
            yield f"rank {snapshot.rank}: {finding}; expected two factors of each product at least"


def _one_stage(cell: Cell, driver: type[Driver]) -> str | None:
    if not PRECISIONS.get(cell.precision).float8 or STRATEGIES.get(cell.strategy).zero_stage is None:
        return "8 bits and DeepSpeed are not used together"
    reasons = (driver.unsupported_reason(run.cell(cell)) for run in STAGES.runs)
    return next((f"a stage alone cannot run: {reason}" for reason in reasons if reason), None)


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

    If it fails: see ``float8`` for the first stage, ``active`` for the second. Where only both together break, the trainer
    decides about 8 bits by a precision that DeepSpeed has changed (https://github.com/huggingface/accelerate/issues/3360).
    """
    checks: tuple[tuple[Check, ...], ...] = ((float8,), (active,), (float8, active))
    for run, claims in zip(STAGES.runs, checks, strict=True):
        found, stage = trace.run(run.name), "both" if run.name == "train" else run.name.replace("_", " ")
        alone = Trace(trace.driver, {"train": found})
        texts = [found.end.message] if found.end else [text for one in claims for text in one(run.cell(cell), alone)]
        yield from (f"{stage}: {text}" for text in texts)
        if texts:
            return  # later stages follow from it
