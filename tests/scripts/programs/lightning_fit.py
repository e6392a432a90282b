"""Script: train a small module with Lightning's Trainer under DDP or FSDP2; save and resume on request."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--save-at", type=int, default=0)
parser.add_argument("--resume", type=Path)
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--from-the-start", action="store_true", help="repeat the batches of the epoch after a load")
arguments = parser.parse_args()


class Rows:
    """The batches of a rank; a checkpoint keeps how many of them were yielded."""

    def __init__(self, rank: int) -> None:
        self.generator, self.given = torch.Generator().manual_seed(rank), 0
        self.rows = [torch.randn(4, 3, generator=self.generator) for _ in range(8)]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.given < len(self.rows):
            self.given += 1
            yield self.rows[self.given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = 0 if arguments.from_the_start else state["given"]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, batch: torch.Tensor) -> Any:
        return self.layers(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]

    def training_step(self, batch: torch.Tensor, _number: int) -> Any:
        return self(batch).square().mean()


torch.manual_seed(0)
strategies: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
    "fsdp2": lambda: ModelParallelStrategy(2, 1, process_group_backend="gloo"),
}
checkpoints = ModelCheckpoint(dirpath=arguments.output, every_n_train_steps=arguments.save_at, save_top_k=-1)
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategies[arguments.strategy](),
    max_steps=arguments.steps,
    callbacks=[checkpoints] if arguments.save_at else [],
    enable_checkpointing=bool(arguments.save_at),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module: Any = Module()
trainer.fit(module, Rows(trainer.global_rank), ckpt_path=str(arguments.resume) if arguments.resume else None)
