"""Which state beside model and optimizer the built-in drivers name in a cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import HasExtraState
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.trace import ExtraState

PLAIN = Cell("ddp", "fp32", 2, (("model", "mlp"),))
WITH_AVERAGE = Cell("ddp", "fp32", 2, (("model", "mlp"), ("ema", True)))


class CountingTorch(TorchDriver):
    extra_state: ClassVar[Mapping[str, ExtraState]] = {"seen": ExtraState()}


class CountingAccelerate(AccelerateDriver):
    extra_state: ClassVar[Mapping[str, ExtraState]] = {"seen": ExtraState()}


@pytest.mark.parametrize("derived", [CountingTorch, CountingAccelerate])
def test_a_derived_drivers_own_state_is_judged_beside_the_average(
    derived: type[HasExtraState],
) -> None:
    assert "seen" in derived.extra_state_in(PLAIN)
    assert "averaged_model" not in derived.extra_state_in(PLAIN)
    assert {"seen", "averaged_model"} <= set(derived.extra_state_in(WITH_AVERAGE))
