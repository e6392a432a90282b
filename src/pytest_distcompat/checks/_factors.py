"""Simple factors by which a loss or a gradient may be too large or too small.

A trainer that sums over ranks where it must average has gradients that are 2 times too large on 2
ranks. The checks ``parity`` and ``gradients`` compare the ratio of a wrong number with such
factors, and name the one that fits in their finding: ``(= the number of ranks)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.trace import RunTrace


def factors_of(cell: Cell, run: RunTrace) -> dict[str, int]:
    """Return name -> factor, without factors of 1: ``{"the number of ranks": 2}``."""
    # A pipeline splits a batch into more micro-batches than accumulation asks for, and a trainer
    # may accumulate unasked. ``inputs`` has an entry for each forward pass.
    micro_batches = int(cell.option("grad_accum"))
    for snapshot in run.at("step"):
        micro_batches = max(micro_batches, len(snapshot.inputs))
    numbers = {
        "the number of ranks": cell.world_size,
        "micro-batches a step": micro_batches,
    }
    for axis in ("tp", "cp", "ep", "pp"):
        numbers[f"the size of {axis}"] = int(cell.option(axis))
    if cell.dp_size < cell.world_size:
        numbers["the number of data-parallel ranks"] = cell.dp_size
    factors: dict[str, int] = {}
    for name, number in numbers.items():
        if number <= 1:
            continue
        factors[name] = number
    return factors


def named_factor(factors: Mapping[str, int], ratio: float, tolerance: float) -> str:
    """Return which factors the ratio is: ``= the number of ranks or 1 / micro-batches a step``.

    The text is empty if it is none of them, nor the inverse of any.

    Args:
        factors: Name -> factor, of ``factors_of``.
        ratio: The wrong number divided by the right one.
        tolerance: How far the ratio may be from a factor, relatively.
    """
    names: list[str] = []
    inverse_names: list[str] = []
    for name, factor in factors.items():
        if math.isclose(ratio, factor, rel_tol=tolerance):
            names.append(name)
        if math.isclose(ratio * factor, 1, rel_tol=tolerance):
            inverse_names.append(f"1 / {name}")
    names += inverse_names
    if not names:
        return ""
    return f"= {' or '.join(names)}"


def times_a_factor(
    number: float, reference: float, factors: Mapping[str, int], tolerance: float
) -> str:
    """Return the words about a number that is off by a factor.

    An example is ``: 2 times the reference's (= the number of ranks)``. The text is empty if no
    factor fits.
    """
    ratio = math.inf
    if reference:
        ratio = number / reference
    factor = named_factor(factors, ratio, tolerance)
    if not factor:
        return ""
    return f": {ratio:.4g} times the reference's ({factor})"
