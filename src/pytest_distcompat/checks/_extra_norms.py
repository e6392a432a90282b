"""Part of the check ``parity``: is extra state, as an average of the weights, the reference's?

A driver names state beside model and optimizer in ``extra_state``, and says by ``in_reference``
that it has the same in its reference, a run of one process. ``checks.parity`` calls
``other_extra_state`` after each step. The probe has recorded the sum of the squares of each tensor,
or of the shard of it that a rank holds. The function yields findings, such as ``averaged_model:
module.inlet.weight has norm 0.5; 0.6 in the reference (1.7e-01 off, 2.0e-04 allowed)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from pytest_distcompat.checks._reference import Allowance
from pytest_distcompat.trace import Snapshot


def other_extra_state(
    snapshots: Iterable[Snapshot], reference: Snapshot, tolerance: float
) -> Iterator[str]:
    """Yield a finding for each extra state that is not the reference's, about its first tensor.

    Args:
        snapshots: Those of all ranks after a step.
        reference: The snapshot of the reference after the same step.
        tolerance: How far a tensor's norm may be from the reference's, relatively.
    """
    squares_by_name: dict[str, list[Mapping[str, float]]] = {}
    for snapshot in snapshots:
        for info in snapshot.extra:
            squares_by_name.setdefault(info.name, []).append(info.squares)
    for expected in reference.extra:
        # Ranks record extra state only after the first steps and the last one, because to read it
        # takes time. After any other step it is not compared.
        if expected.name not in squares_by_name:
            continue
        norms = _norms(squares_by_name[expected.name])
        expected_norms = _norms([expected.squares])
        yield from _other_norms(expected.name, norms, expected_norms, tolerance)


def _norms(squares_of_ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the norm of each whole tensor by its place.

    The place of a shard ends in parentheses that name the part. Ranks with the same part, or with
    the whole tensor, count once.
    """
    square_by_part: dict[str, float] = {}
    for squares in squares_of_ranks:
        square_by_part.update(squares)
    square_by_place: dict[str, float] = {}
    for part, square in square_by_part.items():
        place, _, _ = part.partition(" (")
        square_by_place[place] = square_by_place.get(place, 0.0) + square
    return {place: math.sqrt(square) for place, square in square_by_place.items()}


def _other_norms(
    name: str, norms: Mapping[str, float], expected: Mapping[str, float], tolerance: float
) -> Iterator[str]:
    """Yield a finding for the first tensor that is missing, or has another norm."""
    # What a deviation is relative to where the reference's norm is 0: for a bias of zeros, say.
    largest = max(expected.values(), default=0.0)
    allowance = Allowance(tolerance, largest)
    for place in sorted(expected):
        if place not in norms:
            yield f"{name} has no {place}; the reference has"
            return
        if not allowance.covers(norms[place], expected[place]):
            deviation = allowance.deviation(norms[place], expected[place])
            yield f"{name}: {place} has norm {norms[place]:.6g}; {deviation}"
            return
