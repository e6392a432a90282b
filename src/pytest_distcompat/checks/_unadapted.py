"""Whether a new adapter changes what the model computes, for the check ``start``.

LoRA and its like begin as if they were not there: one of their factors is zero. So the outputs
before any training are those of the model without an adapter. Both are computed by one process in
float32: the run ``adapted`` evaluates the model of ``build_model``, and the run ``unadapted`` that
of a cell without the option ``lora``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._outputs import far_outputs
from pytest_distcompat.driver import Driver
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import (
    ADAPTED_RUN,
    ADAPTED_TRAIN,
    ADAPTER,
    TRAIN,
    UNADAPTED_RUN,
    Scenario,
)
from pytest_distcompat.trace import Trace


def runs_with_adapter(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return the training, and for an adapter that is to change nothing also these two runs."""
    if _begins_as_base(cell) and driver.can("evaluate"):
        return ADAPTED_TRAIN
    return TRAIN


def _begins_as_base(cell: Cell) -> bool:
    """Tell whether a new adapter is to change nothing.

    A cell with ``LoraConfig.init_lora_weights=false``, for example, asks for another beginning. On
    quantized weights there is no model to compare with.
    """
    if cell.option("lora") is not True:
        return False
    for owner in ADAPTER:
        for field in cell.settings(owner):
            if field.startswith("init_"):
                return False
    return True


def other_outputs(trace: Trace) -> Iterator[str]:
    """Yield a finding if a new adapter changes the outputs; none without the two runs."""
    if ADAPTED_RUN.name not in trace.runs:
        return
    adapted = trace.run(ADAPTED_RUN.name).at("evaluate")
    unadapted = trace.run(UNADAPTED_RUN.name).at("evaluate")
    if not adapted or not unadapted or not unadapted[0].outputs:
        yield "without the adapter the model computed nothing to compare with"
        return
    tolerance = PRECISIONS.get("fp32").loss_tolerance
    far = far_outputs(adapted[0].outputs, unadapted[0].outputs, tolerance)
    if far is not None:
        yield f"a new adapter changes outputs of the model by up to {far.most:.3g} {far.limit}"
