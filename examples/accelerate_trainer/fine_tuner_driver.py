"""Driver for the trainer ``fine_tuner.FineTuner``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat import Driver

if TYPE_CHECKING:
    from torch import nn


class FineTunerDriver(Driver):
    """fine_tuner.FineTuner on a tiny model."""

    name: ClassVar[str] = "fine_tuner"
    #: Known issues of these are expected, whoever finds them.
    libraries: ClassVar[tuple[str, ...]] = ("accelerate", "torch")
    preload: ClassVar[tuple[str, ...]] = ("fine_tuner", "accelerate.utils.fsdp_utils", "torch._dynamo")
    blocks = ("Layer",)

    def build_model(self) -> nn.Module:
        import fine_tuner
        import torch

        torch.manual_seed(0)
        return fine_tuner.Model().to(torch.bfloat16 if "bf16" in self.cell.precision else torch.float32)

    def build(self, model: nn.Module) -> None:
        import fine_tuner
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        from pytest_distcompat.drivers.accelerate import on_cpu

        settings: dict[str, Any] = {"mixed_precision": "bf16" if "bf16" in self.cell.precision else "no"}
        if self.cell.strategy == "fsdp2":
            wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Layer"]}
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", **wrap)
            settings["fsdp_plugin"] = plugin
        if self.world.device == "cpu":
            # accelerate takes FSDP on CPU ranks for plain DDP, without a word.
            settings |= on_cpu(settings)
        self.trainer = fine_tuner.FineTuner(model, Accelerator(**settings))
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer

    def step(self, number: int) -> float:
        import torch

        generator = torch.Generator().manual_seed(100 * number + self.world.rank)
        x, labels = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        loss = self.trainer.step(x.to(self.world.device, self.dtype), labels.to(self.world.device))
        self.grad_norm = self.trainer.norm
        return loss

    @property
    def dtype(self) -> Any:
        import torch

        return torch.bfloat16 if self.cell.precision == "bf16_upcast" else torch.float32

    def save(self, directory: Path) -> None:
        self.trainer.save(directory)

    def load(self, directory: Path) -> None:
        self.trainer.load(directory)
