"""transformers.Trainer: all six strategies by TrainingArguments, checkpoints by Trainer itself while it trains.

https://huggingface.co/docs/transformers/main_classes/trainer, https://huggingface.co/docs/transformers/fsdp,
https://huggingface.co/docs/transformers/deepspeed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.driver import Plan, Seen
from pytest_distcompat.drivers import _options, _preload, _releases
from pytest_distcompat.drivers._tiny import DECAY, LEARNING_RATE, TinyDriver
from pytest_distcompat.drivers._trainer_callback import PlanDoneError, tell
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.strategies._base import MAX_NORM
from pytest_distcompat.strategies._fsdp import name_blocks

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell

#: The one decay whose rates do not depend on how many steps are still to come. Before transformers 5 the time scale is not
#: handed on, and the rate all but stays.
SCHEDULE: dict[str, Any] = {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": 10}}


class TrainerDriver(TinyDriver):
    """Trainer as its users have it: it makes the optimizer and the scheduler itself, when it thinks fit."""

    name: ClassVar[str] = "trainer"
    mean: ClassVar[str] = "token"
    preload: ClassVar[tuple[str, ...]] = _preload.TRAINER
    options: ClassVar[tuple[str, ...]] = (
        "model",
        "state_dict",
        "compile",
        "activation_checkpointing",
        "grad_accum",
        "cpu_offload",
        "reshard_after_forward",
        "dp_replicate",
        "use_orig_params",
        "cpu_ram_efficient_loading",
        "wrap_policy",
        "frozen",
        "lora",
        "save_only_model",
        "float32_norms",
        "grad_accum_dtype",
        "reduce_dtype",
        "conflict",
    )
    libraries: ClassVar[tuple[str, ...]] = ("transformers", "accelerate", "torch", "deepspeed")
    reshards: ClassVar[tuple[str, ...]] = ("ddp", "fsdp1", "fsdp2")
    portable: ClassVar[Mapping[str, str]] = {"fsdp1": "fsdp2"}
    order: ClassVar[int] = 3

    trainer: Any = None

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        """The strategies without a dialect, what TrainingArguments cannot say, and what crashes on this device."""
        if STRATEGIES.get(cell.strategy).transformers is None:
            return f"Trainer has no {cell.strategy}"
        if cell.option("param_groups"):
            return "Trainer makes these two groups of parameters anyway"
        if cell.option("reduce_dtype") != "auto" and "fsdp" in cell.strategy:
            return "TrainingArguments have no word for FSDP's policy of dtypes"
        if cell.option("fp8_backend") == "te":
            return "Trainer hands accelerate no recipe for Transformer Engine"
        if cell.option("activation_checkpointing") and cell.option("model") == "mlp" and "fsdp" not in cell.strategy:
            return "Trainer has the model recompute, and the plain one has no gradient_checkpointing_enable()"
        return _options.unsupported_by_accelerate(cell, device) or super().unsupported_reason(cell, device)

    def groups(self, model: Module) -> Any:
        """Trainer's own two groups, for the reference: norms and biases without weight decay."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not self.cell.option("use_orig_params"):
            # A flat parameter belongs to one group as a whole: https://docs.pytorch.org/docs/stable/fsdp.html (use_orig_params).
            return [{"params": [p for _, p in trained], "weight_decay": DECAY}]
        free = {name for name, _ in trained if "bias" in name or "norm" in name}
        return [
            {"params": [p for name, p in trained if name not in free], "weight_decay": DECAY},
            {"params": [p for name, p in trained if name in free], "weight_decay": 0.0},
        ]

    def make_scheduler(self, optimizer: torch.optim.Optimizer, every: int = 1) -> Any:
        """For the reference, the schedule that ``arguments`` ask for, as Trainer gets it."""
        from transformers import get_scheduler

        kind, more = SCHEDULE["lr_scheduler_type"], SCHEDULE["lr_scheduler_kwargs"]
        return get_scheduler(
            kind, optimizer, num_warmup_steps=0, num_training_steps=every, scheduler_specific_kwargs=more
        )

    def arguments(self, plan: Plan) -> dict[str, Any]:
        """The keyword arguments for TrainingArguments."""
        from transformers import TrainingArguments

        batch = self.tiny.batch(0, 0)
        settings: dict[str, Any] = {
            "output_dir": str(plan.save_to),
            "per_device_train_batch_size": len(next(iter(batch.values()))),
            "gradient_accumulation_steps": self.accumulate,
            "max_steps": plan.last_step,
            "optim": "adamw_torch",
            "learning_rate": LEARNING_RATE,
            "weight_decay": DECAY,
            "max_grad_norm": MAX_NORM,
            **SCHEDULE,
            "average_tokens_across_devices": True,
            # Checkpoints are asked for by a callback, where the plan has them.
            "save_strategy": "no",
            "save_only_model": bool(self.cell.option("save_only_model")),
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "disable_tqdm": True,
            "report_to": "none",
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
        }
        settings |= self._dialect()[0]
        settings |= self._mixed_precision()
        if self.cell.option("activation_checkpointing") and "fsdp" not in self.cell.strategy:
            settings |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        if (how := self.cell.option("compile")) not in {False, "partial"}:
            settings |= {"torch_compile": True, "torch_compile_backend": "inductor" if how is True else "aot_eager"}
        if hasattr(TrainingArguments, "train_sampling_strategy"):
            settings["train_sampling_strategy"] = "sequential"
        return settings | (on_cpu(settings) if self.world.device == "cpu" else {})

    def _dialect(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The strategy as TrainingArguments of the installed release take it, and as variables what they have no word for: seen
        with transformers 4.50 to 5.23.
        """
        import transformers
        from packaging.version import Version

        assert self.strategy.transformers is not None
        told = self.strategy.transformers(self.precision, self.cell)
        name_blocks(told, self.blocks)
        words, said = _releases.fsdp_words(told, Version(transformers.__version__))
        return {**told, **words}, said

    def _mixed_precision(self) -> dict[str, Any]:
        """DeepSpeed has its low-precision mode in its own JSON, under the name of mixed precision."""
        mixed = (self.precision.mixed and not self.precision.float8) or self.strategy.zero_stage is not None
        flag = {"bfloat16": "bf16", "float16": "fp16"}.get(self.precision.compute)
        return {flag: True} if mixed and flag else {}

    def environment(self) -> dict[str, str]:
        """What ``accelerate launch`` says by the environment because TrainingArguments cannot."""
        said = self._dialect()[1]
        if self.precision.float8:
            said["ACCELERATE_MIXED_PRECISION"] = "fp8"
        if self.cell.option("compile") == "regional":
            said["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        return said

    def make_trainer(self, **settings: Any) -> Any:
        """``transformers.Trainer``."""
        from torch.utils.data import SequentialSampler
        from transformers import Trainer

        if hasattr(settings["args"], "train_sampling_strategy"):
            return Trainer(**settings)

        class InOrder(Trainer):  # type: ignore[misc]  # transformers is untyped here
            """Before transformers 5 a method is all that chooses the sampler."""

            def _get_train_sampler(self, *_: Any) -> Any:
                return SequentialSampler(self.train_dataset)

        return InOrder(**settings)

    def train(self, model: Module, plan: Plan, seen: Seen) -> None:
        """All of it is one call to ``Trainer.train``. What it does when is told by a callback, see ``tell``.

        Making the Trainer is the build that can be refused; where a checkpoint is loaded, all else is the load.
        """
        import os

        from transformers import PrinterCallback, TrainingArguments
        from transformers.trainer_utils import get_last_checkpoint

        os.environ.update(self.environment())
        if self.cell.option("compile") == "partial":
            _options.compile_blocks("partial", self.block_modules(model))
        self.trainer = self.make_trainer(
            model=model,
            args=TrainingArguments(**self.arguments(plan)),
            train_dataset=self.dataset(self.world.size),
            compute_loss_func=None if hasattr(model, "config") else self._loss(),
        )
        self.trainer.remove_callback(PrinterCallback)
        checkpoint = None
        if "load" in plan.actions:
            self.model = model
            seen("build")
            checkpoint = get_last_checkpoint(str(plan.load_from))
            if checkpoint is None:
                raise FileNotFoundError(f"{plan.load_from} holds no directory checkpoint-N")
        self.trainer.add_callback(tell(self, plan, seen))
        with contextlib.suppress(PlanDoneError):
            self.trainer.train(resume_from_checkpoint=checkpoint)

    def overflow(self, number: int) -> float:
        """Not called: ``train`` does every step, and the callback makes the gradients of this one overflow."""
        raise NotImplementedError

    def _loss(self) -> Callable[..., torch.Tensor]:
        """For a model that computes none."""

        def loss(outputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
            from torch.nn import functional

            return functional.cross_entropy(outputs.float(), labels, reduction="sum") / num_items_in_batch

        return loss

    def dataset(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        """Rows under the names of the model's own arguments."""
        return [
            {"x" if name == "features" else name: value for name, value in row.items()}
            for row in super().dataset(ranks)
        ]

    def look(self) -> None:
        """Take over what the Trainer has."""
        trainer = self.trainer
        self.model, self.optimizer, self.scheduler = trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler
        self.scaler = trainer.accelerator.scaler

    def export(self, directory: Path) -> None:
        """``save_model``, after what the documentation puts before it under FSDP: sharded, it writes nothing and says nothing.

        For FSDP1 on CPU ranks, where gathering crashes torch, the documented merge of a sharded checkpoint.
        """
        accelerator = self.trainer.accelerator
        if self.cell.strategy == "fsdp1" and self.world.device == "cpu":
            self._gather(directory)
            return
        if "fsdp" in self.cell.strategy:
            accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        self.trainer.save_model(str(directory))

    def _gather(self, directory: Path) -> None:
        accelerator, model = self.trainer.accelerator, self.trainer.model_wrapped
        unwrapped, main = accelerator.unwrap_model(self.trainer.model), self.world.rank == 0
        if self.cell.option("lora"):
            unwrapped.save_pretrained(directory, is_main_process=main, state_dict=_options.whole_state(model))
            return
        _options.merge_shards(accelerator, self.trainer.model, directory)
        if main and hasattr(unwrapped, "config"):
            unwrapped.config.save_pretrained(directory)

    def trainer_world_size(self) -> int | None:
        """What Trainer believes."""
        return None if self.trainer is None else int(self.trainer.args.world_size)


def on_cpu(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What makes ``TrainingArguments(**settings)`` really run on CPU what the settings ask for.

    ``use_cpu`` alone turns FSDP into plain DDP without a word, and without it DeepSpeed believes that each rank is alone.
    For FSDP the state of accelerate is made beforehand, as ``drivers.accelerate.on_cpu`` says, which checks the version;
    that Trainer takes it over is ``use_configured_state``, public.
    """
    from pytest_distcompat.drivers import accelerate

    if not settings.get("fsdp"):
        return {"use_cpu": True}
    accelerate.on_cpu({"fsdp_plugin": settings["fsdp_config"]})
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
