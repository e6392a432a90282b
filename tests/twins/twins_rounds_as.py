"""Trainers that round otherwise than a setting says: the tolerances of another precision are no licence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver

from .declare import GRADIENTS, twin

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

#: The products of a cell in fp32 are in bfloat16: it has the tolerances of ``bf16_upcast``.
AUTOCAST = "zero2-fp32-w2-model_mlp-set_ds_config.torch_autocast.dtype=bfloat16+ds_config.torch_autocast.enabled=true"


@twin(
    "parity",
    AUTOCAST,
    match=r"^step 1: the loss is [\d.]+; [\d.]+ in the reference \([\d.]+e-0\d off, 2\.2e-03 allowed\)",
    # Of the setting, not of the defect: the sweep does not run the check under it.
    also={"dtypes": r"^rank 0: matrix products ran in bfloat16; expected float32"} | GRADIENTS,
)
class RoundsToEightBits(DeepSpeedDriver):
    """Products are rounded to 8 bits, where the setting says 16."""

    def build(self, model: Module) -> None:
        import torch

        super().build(model)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(_in_8_bits)


def _in_8_bits(_module: Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Return the output rounded to 8 bits; gradients pass."""
    import torch

    rounded = output.detach().to(torch.float8_e4m3fn).to(output.dtype)
    return output + (rounded - output.detach())


@twin(
    "parity",
    AUTOCAST,
    match=r"^ds_config\.torch_autocast\.enabled=true rounds nothing: the training equals the reference as one in fp32 does$",
)
class RoundsNothing(DeepSpeedDriver):
    """The setting is lost on the way to the engine."""

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = super()._config()
        autocast: Mapping[str, Any] = config["torch_autocast"]
        return {**config, "torch_autocast": {**autocast, "enabled": False}}
