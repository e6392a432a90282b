"""Which of 8 bits, DeepSpeed and both together breaks?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Check, check
from pytest_distcompat.checks.active import active
from pytest_distcompat.checks.float8 import float8
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import STAGES
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import Trace


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
