"""A driver that calls ``Trainer.fit``, reports from its callbacks, and trains the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat import Driver

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pytest_distcompat.driver import OnAction, Plan

#: Cell to Trainer.
PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16_upcast": "bf16-mixed", "bf16_pure": "bf16-true"}


class LightningDriver(Driver):
    """lit_model.LitModel in Lightning's Trainer."""

    name: ClassVar[str] = "lightning_trainer"
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    preload: ClassVar[tuple[str, ...]] = ("lit_model", "pytorch_lightning.strategies", "torch._dynamo")
    reshards: ClassVar[tuple[str, ...]] = ("ddp", "fsdp2")
    blocks = ("Linear",)

    def build_model(self) -> nn.Module:
        import torch
        from lit_model import LitModel

        torch.manual_seed(0)
        return LitModel().to(torch.bfloat16 if self.cell.precision == "bf16_pure" else torch.float32)

    def batch(self, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs, and what is to be learned of them."""
        import torch

        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * number + rank))
        return x, x[:, :2]

    def trainer(self, steps: int, callback: Any) -> Any:
        """Lightning's Trainer for this cell."""
        from pytorch_lightning import Trainer
        from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

        backend = self.world.backend
        strategies: dict[str, Callable[[], Any]] = {
            "ddp": lambda: DDPStrategy(process_group_backend=backend),
            "fsdp2": lambda: ModelParallelStrategy(self.world.size, 1, process_group_backend=backend),
        }
        return Trainer(
            accelerator=self.world.device.partition(":")[0],
            devices=self.world.size,
            strategy=strategies[self.cell.strategy](),
            precision=PRECISIONS[self.cell.precision],
            max_steps=steps,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def train(self, model: nn.Module, plan: Plan, report: OnAction) -> None:
        """All of it is one call of ``fit``. Where a checkpoint is loaded, what comes before its first step is the load."""
        from lit_model import Rows
        from pytorch_lightning.callbacks import LambdaCallback

        loaded = "load" in plan.actions
        todo = iter(plan.actions[plan.actions.index("load" if loaded else "build") + 1 :])

        def started(trainer: Any, _module: Any) -> None:
            self.model, self.optimizer = trainer.strategy.model, trainer.optimizers[0]
            report("load" if loaded else "build")
            save_until_the_next_step(trainer)

        def stepped(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.grad_norm = module.norm
            report("step", float(outputs["loss"]))
            save_until_the_next_step(trainer)

        def save_until_the_next_step(trainer: Any) -> None:
            while next(todo, "step") == "save":
                trainer.save_checkpoint(plan.save_to / "last.ckpt")
                report("save")

        if loaded:
            self.model = model
            report("build")
        rows = Rows([self.batch(number, self.world.rank) for number in range(plan.last_step)])
        checkpoint = str(plan.load_from / "last.ckpt") if loaded else None
        self.trainer(plan.last_step, LambdaCallback(on_train_start=started, on_train_batch_end=stepped)).fit(
            model, rows, ckpt_path=checkpoint
        )

    def reference(self, model: nn.Module, number: int, ranks: int) -> float:
        import torch
        from torch import nn

        if number == 0:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        batches = [self.batch(number, rank) for rank in range(ranks)]
        loss = torch.stack([nn.functional.mse_loss(model(x).float(), wanted) for x, wanted in batches]).mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.grad_norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        self.optimizer.step()
        return loss.item()
