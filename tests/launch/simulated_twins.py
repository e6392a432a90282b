"""Drivers whose mistakes need no values: each is red in a simulation too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.strategies import WrapSpec

if TYPE_CHECKING:
    from torch.nn import Module


class RootOnly(TorchDriver):
    """Wraps nothing but the root: its class names are those of no module."""

    @property
    def wrap_spec(self) -> WrapSpec:
        return WrapSpec(("NoSuchLayer",), tp_plan=self.tiny.tp_plan)


class WholeLayers(TorchDriver):
    """Has a plan for tensor parallelism whose names fit no layer."""

    @property
    def wrap_spec(self) -> WrapSpec:
        plan = {f"transformer.{name}": style for name, style in self.tiny.tp_plan.items()}
        return WrapSpec(tuple(self.blocks), tp_plan=plan)


class LowMasters(TorchDriver):
    """Shards weights in bfloat16, which the optimizer then updates."""

    def build(self, model: Module) -> None:
        super().build(model.bfloat16())


class UnevenReplicas(TorchDriver):
    """Makes one group of all ranks where the cell asks for replicas."""

    def build(self, model: Module) -> Any:
        self.cell = self.cell.without("dp_replicate")
        super().build(model)
