"""Optimizers whose state was to be in 8 bits, and adapters whose base model was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.drivers.trainer import TrainerDriver

from .declare import GRADIENTS, PARITY, Torch, twin

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision

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


BASE = "ddp-fp32-w2-lora_int8"


@twin(
    "dtypes",
    BASE,
    match=r"^rank 0: 14 of \d+ frozen parameters are stored in float32, first 'module\.base_model\.model\.model\.layers\.0\.self_attn"
    r"\.q_proj\.base_layer\.weight'; loaded in int8\n",
)
class Dequantized(Torch):
    """The base model is widened before it is wrapped: it computes the same, in four times the memory."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.nn import Linear, Parameter

        for module in model.modules():
            if isinstance(module, Linear) and hasattr(module.weight, "qdata"):
                module.weight = Parameter(module.weight.dequantize(), requires_grad=False)
        return super().wrap(model, precision, cell, device)


@twin("export", BASE, match=r"^1 of 9 names are in no exported file, first 'base_model\.model\.lm_head\.weight'\n")
class AdaptersAlone(Torch):
    """What is trained as a whole beside the adapters is not written with them, nor named: PEFT loads it without a word."""

    def export(self, directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        super().export(directory)
        if self.world.rank == 0:
            config = directory / "adapter_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": None}))
            path = directory / "adapter_model.safetensors"
            save_file({name: value for name, value in load_file(path).items() if "lora_" in name}, path)
