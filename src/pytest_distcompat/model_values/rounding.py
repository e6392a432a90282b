"""Which precision's tolerances apply to the numbers of a run.

A cell is one configuration under test, such as ``fsdp2-bf16_upcast-w2``. Checks compare losses and
outputs with a reference in float32, within the tolerance of the cell's precision. Some numbers are
less exact than the precision says: a GPU may multiply float32 in TF32, which has 10 bits of each
factor, and the optimizer Muon computes in bfloat16.
"""

from __future__ import annotations

from pytest_distcompat.cell import Cell
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.trace import RunTrace

#: The evidence that a library turned TF32 on. (A user who wants it sets it before the build.)
TF32_SINCE_BUILD = "products of float32 are in TF32 since build"


def rounding_of(cell: Cell, run: RunTrace) -> Precision:
    """Return the precision whose tolerances apply to training: usually the cell's.

    Muon computes its update in bfloat16 even where the training is in float32.
    """
    if cell.option("optimizer") == "muon" and PRECISIONS.get(cell.precision).compute == "float32":
        return PRECISIONS.get("bf16_upcast")
    return precision_of_products(cell, run)


def precision_of_products(cell: Cell, run: RunTrace) -> Precision:
    """Return the precision whose tolerances apply to what a model computes.

    It is the cell's, or a lower one where float32 is multiplied in TF32.
    """
    precision = PRECISIONS.get(cell.precision)
    # TF32 has float16's 10 bits after the point. Under accelerate on an H100 losses were 2.7e-5
    # off, outputs 4.2e-4.
    if run.tf32 and precision.compute == "float32":
        return PRECISIONS.get("fp16_mixed")
    return precision


def in_tf32(run: RunTrace) -> str:
    """Return words about TF32 for a finding about numbers; empty if the run does not use TF32."""
    if run.tf32_since_build:
        return f"; {TF32_SINCE_BUILD}"
    if run.tf32:
        return "; products of float32 are in TF32"
    return ""
