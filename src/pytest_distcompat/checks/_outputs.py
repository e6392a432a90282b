"""Compare what two models compute on one batch, for the checks ``export`` and ``start``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FarOutputs:
    """Outputs that are further from the expected ones than is allowed.

    Attributes:
        most: The largest distance; NaN if an output is.
        allowed: The distance that is allowed.
        largest: The largest expected output, to which the tolerance is relative.
    """

    most: float
    allowed: float
    largest: float

    @property
    def limit(self) -> str:
        """What is allowed, in words: ``(4.0e-05 allowed, of 2)``."""
        return f"({self.allowed:.1e} allowed, of {self.largest:.3g})"


def far_outputs(
    outputs: Sequence[float], expected: Sequence[float], tolerance: float
) -> FarOutputs | None:
    """Return how far outputs are from the expected ones; None if they are close enough.

    Args:
        outputs: What one model computed.
        expected: What the other one computed on the same batch: as many, and not empty.
        tolerance: How far an output may be off, relative to the largest expected one.
    """
    largest = max(abs(value) for value in expected)
    allowed = largest * tolerance
    distances: list[float] = []
    for output, expected_output in zip(outputs, expected, strict=True):
        distances.append(abs(output - expected_output))
    # Not ``any(distance > allowed)``, which is false for NaN.
    if all(distance <= allowed for distance in distances):
        return None
    return FarOutputs(max(distances), allowed, largest)
