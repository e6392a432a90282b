"""Optimizers whose state was to be in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.drivers.trainer import TrainerDriver

from .declare import GRADIENTS, PARITY, Torch, twin

KEPT = r"^rank 0: exp_avg is kept in float32; expected uint8\n(?s:.*)rank 1: exp_avg_sq is kept in float32; expected uint8$"
#: Rounded state is another training from the third step on.
WHOLE = {
    "memory": r"^rank 0: \d+ elements of quantized state take \d+ bytes; expected less than 2 each\nrank 1",
    **PARITY,
    **GRADIENTS,
}


@twin("dtypes", "fsdp2-fp32-w2-model_wide-optimizer_adam8bit", match=KEPT, also=WHOLE, sound="torch")
class BlocksThatDoNotFit(TorchDriver):
    """The size of a block divides no tensor: torchao keeps all state in float32 then, without a word."""

    def make_optimizer(self, model: Any) -> Any:
        optimizer = super().make_optimizer(model)
        optimizer.block_size = 384
        return optimizer


@twin("dtypes", "ddp-fp32-w2-model_wide-optimizer_adam8bit", match=KEPT, also=WHOLE)
class NotPassedOn(TrainerDriver):
    """The name of the optimizer is lost on the way, and Trainer makes its default."""

    def arguments(self, plan: Any) -> dict[str, Any]:
        return super().arguments(plan) | {"optim": "adamw_torch"}


@twin(
    "resume",
    "ddp-fp32-w2-model_wide-optimizer_adam8bit",
    "fsdp2-fp32-w2-model_wide-optimizer_adam8bit",
    match=r"^rank 0: optimizer state 'exp_avg of (module\.)?blocks\.0\.linear\.weight' and 3 others: other values after the load",
)
class PlainTensorsOnly(Torch):
    """A load takes plain tensors alone: quantized state begins at zero."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        for state in self.optimizer.state.values():
            for value in state.values():
                local = value.to_local() if hasattr(value, "to_local") else value
                if hasattr(local, "codes"):
                    local.scale.zero_()
