"""A trainer that ends in every way: what real.json, beside its directory, was made with (see docs/first-run.md)."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from pytest_distcompat.drivers.torch import TorchDriver


class Faulty(TorchDriver):
    """Plain torch, wrong in one way in some cells."""

    name = "faulty"
    steps = 0

    def build(self, model: Any) -> None:
        if self.cell.id == "fsdp2-fp16_mixed-w2":
            raise NotImplementedError("float16 is not supported")
        super().build(model)

    def step(self, number: int) -> float:
        self.steps += 1
        place = (self.cell.id, self.world.rank, self.steps)
        if place == ("fsdp1-fp32-w2", 1, 2):
            raise RuntimeError("rank <1> & its <script>alert('batch')</script> are gone")
        if place == ("ddp-bf16_upcast-w2", 1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        if place == ("fsdp2-bf16_upcast-w2", 0, 2):
            time.sleep(3600)
        return super().step(number)

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        if self.cell.id == "fsdp2-fp32-w2":
            state["model"] = {f"_orig_mod.{name}": value for name, value in state["model"].items()}
        return state
