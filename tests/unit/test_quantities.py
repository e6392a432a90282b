"""Quantities of a step that two runs of a script are compared by, on a GPU too."""

from __future__ import annotations

import pytest

from pytest_distcompat.ext.scripts.quantities import are_equal
from pytest_distcompat.trace import Snapshot


def step(loss: float | None) -> Snapshot:
    return Snapshot(0, "train", "step", 0, loss=loss)


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
    [
        pytest.param(2.0, 2.0, True, id="the same loss"),
        pytest.param(2.0, 2.1, False, id="another loss"),
        pytest.param(None, None, True, id="no loss"),
        pytest.param(2.0, None, False, id="a loss that is missing"),
        pytest.param(None, 2.0, False, id="a loss too many"),
    ],
)
def test_losses(expected: float | None, actual: float | None, equal: bool, on_cpu: bool) -> None:
    assert are_equal("losses", step(expected), step(actual), on_cpu=on_cpu) is equal


def test_a_gpu_rounds_sums_in_any_order() -> None:
    assert are_equal("losses", step(2.0), step(2.0 + 1e-5), on_cpu=False)
    assert not are_equal("losses", step(2.0), step(2.0 + 1e-5), on_cpu=True)
