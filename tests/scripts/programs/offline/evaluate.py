"""As much of ``evaluate`` as accelerate's checkpoint script calls."""

from __future__ import annotations

from typing import Any


class Accuracy:
    """The share of predictions that are right."""

    def __init__(self) -> None:
        self.right: list[bool] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self.right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        right, self.right = self.right, []
        return {"accuracy": sum(right) / len(right)}


def load(*_: Any) -> Accuracy:
    return Accuracy()
