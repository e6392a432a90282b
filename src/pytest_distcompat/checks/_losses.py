"""Compare the losses of all ranks with those of one process, and name the cause of another one.

The checks ``parity`` and ``again`` train the same model as a reference: one process in float32, on
the batches of all ranks. A cell is one point of the test matrix, such as ``fsdp2-fp32-w2``; a
snapshot is what one rank records after a step. Ranks may report a mean of their batch each, whose
average is the loss of the reference, or their parts of a sum (``add_up``).

A finding is such as ``the loss is 3; 1.5 in the reference (1.0e+00 off, 2.0e-05 allowed): 2 times
the reference's (= the number of ranks)``. The cause, named where a simple one fits, is another kind
of mean or a factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import Snapshots, finite_losses
from pytest_distcompat.checks._factors import times_a_factor
from pytest_distcompat.checks._reference import Allowance
from pytest_distcompat.trace import Snapshot


def add_up(cell: Cell, snapshots: Snapshots, reference: Snapshot, tolerance: float) -> bool:
    """Tell whether each rank's loss is its part of a sum, which is the reference's loss.

    Args:
        cell: The cell.
        snapshots: Those of all ranks after a step.
        reference: The snapshot of the reference after the same step.
        tolerance: How far the sum may be from the reference's loss, relatively.
    """
    losses = _losses(snapshots)
    if cell.dp_size == 1 or not losses or len(losses) != len(snapshots):
        return False
    if reference.loss is None:
        return False
    # Ranks that share a batch report the same loss, so the mean is multiplied by the number of
    # different batches.
    total = cell.dp_size * sum(losses) / len(losses)
    return math.isclose(total, reference.loss, rel_tol=tolerance)


def _losses(snapshots: Snapshots) -> list[float]:
    """Return the losses that ranks reported; a rank may have reported none."""
    losses: list[float] = []
    for snapshot in snapshots:
        if snapshot.loss is not None:
            losses.append(snapshot.loss)
    return losses


def times_ranks(snapshot: Snapshot, cell: Cell) -> Snapshot:
    """Return the snapshot with its loss times the number of data-parallel ranks.

    The loss of a rank was its part of a sum; the mean of the results over ranks is that sum.
    """
    if snapshot.loss is None:
        return snapshot
    loss = snapshot.loss * cell.dp_size
    return dataclasses.replace(snapshot, loss=loss)


def other_loss(
    cell: Cell,
    snapshots: Snapshots,
    reference: Snapshot,
    allowance: Allowance,
    factors: Mapping[str, int],
) -> Iterator[str]:
    """Yield a finding if the average of the ranks' losses is not the reference's loss.

    Args:
        cell: The cell.
        snapshots: Those of all ranks after a step.
        reference: The snapshot of the reference after the same step.
        allowance: How far the loss may be off.
        factors: Name -> number that a wrong loss may be multiplied by: ``{"the number of ranks":
            2}``. If one fits, the finding names it.
    """
    losses = _losses(snapshots)
    if len(losses) != len(snapshots) or reference.loss is None:
        yield "no loss to compare; expected step() to return it on every rank, and reference()"
        return
    infinite = list(finite_losses(snapshots, "this step"))
    if infinite:
        yield from infinite
        return
    loss = sum(losses) / len(losses)
    if allowance.covers(loss, reference.loss):
        return
    cause = _other_average(cell, loss, reference, allowance.tolerance)
    if not cause:
        cause = times_a_factor(loss, reference.loss, factors, allowance.tolerance)
    deviation = allowance.deviation(loss, reference.loss)
    yield f"the loss is {loss:.6g}; {deviation}{cause}"


def _other_average(cell: Cell, loss: float, reference: Snapshot, tolerance: float) -> str:
    """Return the words about a loss that is another kind of mean than the reference's.

    An example is ``: here each micro-batch counts alike, there each token``, where *here* is the
    trainer and *there* the reference. The text is empty if the loss is no such mean.

    A mean that is multiplied by the number of data-parallel ranks, or of micro-batches, is
    recognized too: such a loss is meant to be a part of a sum.

    Args:
        cell: The cell.
        loss: The mean of the ranks' losses.
        reference: The snapshot of the reference. Its ``averages`` map what counts alike
            (``each token``) to the loss that the reference would have as that mean.
        tolerance: How far numbers may be apart, relatively.
    """
    reference_weights = _equal_weights(reference.loss or 0.0, reference, tolerance)
    if not reference_weights:
        return ""
    reference_weight = reference_weights[0]
    weights = _equal_weights(loss, reference, tolerance)
    # Both are the same kind of mean, so the cause is another one.
    if not set(weights).isdisjoint(reference_weights):
        return ""
    if weights:
        return f": here {weights[0]} counts alike, there {reference_weight}"
    # The two numbers may be the same, as 2 ranks and 2 micro-batches: then one text names both.
    names_by_factor: dict[int, list[str]] = defaultdict(list)
    names_by_factor[cell.dp_size].append("ranks")
    names_by_factor[int(cell.option("grad_accum"))].append("micro-batches a step")
    for factor, names in names_by_factor.items():
        weights = _equal_weights(loss / factor, reference, tolerance)
        if weights:
            product = f"times {factor}, the number of {' or of '.join(names)}"
            return f": here {weights[0]} counts alike, {product}, there {reference_weight}"
    return ""


def _equal_weights(loss: float, reference: Snapshot, tolerance: float) -> list[str]:
    """Return what counts alike in a loss: each name in ``averages`` whose number is this loss.

    There are several if means agree, as if all micro-batches have equally many tokens.
    """
    names = []
    for name, average in reference.averages.items():
        if math.isclose(loss, average, rel_tol=tolerance):
            names.append(name)
    return names
