"""Driver for torchtitan's own Trainer: its registry, its configuration, its checkpointer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat import Driver

if TYPE_CHECKING:
    from torch import nn


class TitanDriver(Driver):
    """torchtitan.trainer.Trainer on its debug Llama."""

    name: ClassVar[str] = "torchtitan"
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    preload: ClassVar[tuple[str, ...]] = ("small_titan",)
    options: ClassVar[tuple[str, ...]] = ("tp", "dp_replicate", "activation_checkpointing", "grad_accum")
    reshards: ClassVar[tuple[str, ...]] = ("fsdp2",)
    blocks = ("Llama3TransformerBlock",)

    def config(self) -> Any:
        from small_titan import small_config
        from torchtitan.distributed.activation_checkpoint import FullAC

        config, cell = small_config(), self.cell
        mixed = cell.precision == "bf16_upcast"
        config.training.mixed_precision_param = "bfloat16" if mixed else "float32"
        config.training.global_batch_size = config.training.local_batch_size * cell.dp_size * cell.option("grad_accum")
        config.parallelism.tensor_parallel_degree = cell.tp
        config.parallelism.data_parallel_replicate_degree = cell.option("dp_replicate")
        if cell.option("activation_checkpointing"):
            config.activation_checkpoint = FullAC.Config()
        return config

    def build_model(self) -> nn.Module:
        import torch
        from torchtitan.distributed.utils import set_spmd_backend

        config = self.config()
        set_spmd_backend(config.parallelism.spmd_backend)
        torch.manual_seed(0)
        config.model_spec.model.update_from_config(config=config)
        model: nn.Module = config.model_spec.model.build()
        model.init_weights(buffer_device=None)  # type: ignore[operator]
        return model

    def build(self, model: nn.Module) -> None:
        import torch
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import distribute_tensor

        config = self.config()
        config.checkpoint.enable, config.checkpoint.interval = True, 1
        self.trainer = config.build()
        (self.model,) = self.trainer.model_parts
        self.optimizer, self.scheduler = self.trainer.optimizers.optimizers[0], self.trainer.lr_schedulers.schedulers[0]
        with torch.no_grad():
            for parameter, given in zip(self.model.parameters(), model.parameters(), strict=True):
                parameter.copy_(distribute_tensor(given, parameter.device_mesh, parameter.placements))
        if self.world.backend == "gloo":
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        self.batches = self.trainer.batch_generator(self.trainer.dataloader)

    def step(self, number: int) -> float:
        self.trainer.step = number + 1
        self.trainer.train_step(self.batches)
        self.grad_norm = self.trainer.metrics_processor.grad_norm
        return float(self.trainer.metrics_processor.loss)

    def save(self, directory: Path) -> None:
        self.trainer.checkpointer.folder = str(directory)
        self.trainer.checkpointer.save(self.trainer.step)

    def load(self, directory: Path) -> None:
        self.trainer.checkpointer.folder = str(directory)
        self.trainer.checkpointer.load()

    def reference(self, model: nn.Module, number: int, ranks: int) -> float:
        """Train as torchtitan does, whose loss is divided by the labels of all ranks and micro-batches."""
        import torch
        from small_titan import batch
        from torch.nn.functional import cross_entropy

        if self.optimizer is None:
            config = self.config()
            self.containers = [config.optimizer.build(model_parts=[model])]
            self.containers += [
                config.lr_scheduler.build(optimizers=self.containers[0], training_steps=config.training.steps)
            ]
            self.optimizer, self.scheduler = self.containers[0].optimizers[0], self.containers[1].schedulers[0]
        micro = int(self.cell.option("grad_accum"))
        batches = [batch(number * micro + nth, rank) for nth in range(micro) for rank in range(ranks)]
        inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        self.optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        self.optimizer.step()
        self.scheduler.step()
        return float(loss)
