"""TrainingArguments of the driver for Trainer: how a cell becomes arguments and variables.

``TrainerDriver`` (``trainer.py``) inherits ``TrainerArguments``. Before it creates a Trainer, it
sets the variables of ``environment()`` and calls ``arguments(plan)``; the result is passed to
``transformers.TrainingArguments``. A cell is one configuration under test: ``fsdp2-bf16_upcast-w2``
becomes ``fsdp=True``, an ``fsdp_config`` and ``bf16=True``. The plan has the actions of the run
(``build``, ``step``, ``save``, ``load``) and the directory to save into. ``TrainerArguments``
itself inherits, by ``TrainerReference``, what all built-in drivers have: the cell, the tiny model
``tiny`` that they train, ``accumulate`` (micro-batches a step) and ``wrap_spec`` (which modules to
shard one by one).

The arguments come from several places, a later one overrides an earlier one: those of every cell,
the strategy's backend config (``strategies/``), the cell's precision and options, what CPU ranks
need, and the cell's settings, as ``TrainingArguments.weight_decay=0.1`` in its option ``set``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.driver import Plan
from pytest_distcompat.ext.upstream.drivers import _options, _releases, _trainer_reasons
from pytest_distcompat.ext.upstream.drivers._tiny_training import DECAY, LEARNING_RATE
from pytest_distcompat.ext.upstream.drivers._trainer_reference import (
    OPTIMIZERS,
    SCHEDULE,
    TrainerReference,
)
from pytest_distcompat.strategies import MAX_NORM

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell

#: How many rows of an evaluation a rank gets at a time.
EVALUATED_ROWS = 2
#: A number of steps that no training takes: Trainer saves and evaluates when the driver's callback
#: asks for it, not every so many steps.
NEVER = 1_000_000


class TrainerArguments(TrainerReference):
    """Driver that makes ``TrainingArguments`` of its cell."""

    @property
    def in_parts(self) -> bool:
        """Tell whether transformers shards the model while it loads it.

        It does so for tensor and expert parallelism.
        """
        return self.cell.tp * self.cell.ep > 1

    def arguments(self, plan: Plan) -> dict[str, Any]:
        """Return the keyword arguments for TrainingArguments."""
        from transformers import TrainingArguments

        # The batch of step 0 on rank 0, by name, as ``input_ids`` and ``labels``. Each tensor has
        # the rows as its first dimension.
        first_batch = self.tiny.batch(0, 0)
        first_tensor, *_ = first_batch.values()
        optimizer = str(self.cell.option("optimizer"))
        last_step = plan.last_step
        if not plan.steps:
            # The plan ends with a build or a load, which the driver's callback reports when Trainer
            # begins the next step. So there must be one; the callback ends the training before it.
            last_step += 1
        settings: dict[str, Any] = {
            "output_dir": str(plan.save_to),
            "per_device_train_batch_size": len(first_tensor),
            "per_device_eval_batch_size": EVALUATED_ROWS,
            "gradient_accumulation_steps": self.accumulate,
            "max_steps": last_step,
            # Muon has no name there: ``optimizer_class`` makes it.
            "optim": OPTIMIZERS.get(optimizer, "adamw_torch"),
            "optim_args": self.optimizer_arguments,
            "learning_rate": LEARNING_RATE,
            "weight_decay": DECAY,
            "max_grad_norm": MAX_NORM,
            **SCHEDULE,
            "average_tokens_across_devices": True,
            # A callback requests checkpoints where the plan saves.
            "save_strategy": "no",
            "save_only_model": bool(self.cell.option("save_only_model")),
            "save_on_each_node": self.world.own_disks,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "disable_tqdm": True,
            "report_to": "none",
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
        }
        if self.in_parts and optimizer == "adamw":
            # Trainer's own default, the fused AdamW, as users of such models have it. One fused
            # call updates parameters of one mesh only, so Trainer makes param groups by mesh.
            del settings["optim"]
        if self.loads_best(self.cell):
            # Trainer refuses to load the best checkpoint unless it saves and evaluates by the same
            # strategy. The callback requests both where the plan saves.
            steps = {"eval_strategy": "steps", "eval_steps": NEVER}
            settings |= {**steps, "save_strategy": "steps", "save_steps": NEVER}
        backend_arguments, _ = self._backend_config()
        settings |= backend_arguments
        settings |= self._mixed_precision()
        settings |= self._recomputation()
        settings |= self._compilation()
        # Rows are read in order, as the reference, a run of one process, reads them. Before
        # transformers 5 ``make_trainer`` sees to that.
        if hasattr(TrainingArguments, "train_sampling_strategy"):
            settings["train_sampling_strategy"] = "sequential"
        if self.world.device == "cpu":
            settings |= on_cpu(settings, in_parts=self.in_parts)
        return self.cell.with_settings("TrainingArguments", settings)

    def _backend_config(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the strategy as arguments of TrainingArguments and as environment variables.

        The variables say what the installed release has no argument for: with transformers 4, for
        example, ``{"FSDP_VERSION": "2"}``. Tested with transformers 4.50 to 5.23.
        """
        import transformers
        from packaging.version import Version

        assert self.strategy.transformers is not None
        # Spelled as the latest release wants it, then as the installed one does.
        arguments = dict(self.strategy.transformers(self.precision, self.cell, self.wrap_spec))
        overrides, variables = _releases.fsdp_for_release(
            arguments, Version(transformers.__version__)
        )
        return {**arguments, **overrides}, variables

    def _mixed_precision(self) -> dict[str, Any]:
        """Return the flag for mixed precision: ``{"bf16": True}``; empty for none.

        fp8 has no flag: ``environment`` sets it. DeepSpeed needs the flag of the dtype that is
        computed in also for a model that has one dtype as a whole.
        """
        mixed = self.precision.mixed and not self.precision.float8
        flag = {"bfloat16": "bf16", "float16": "fp16"}.get(self.precision.compute)
        if flag is None:
            return {}
        if not mixed and self.strategy.zero_stage is None:
            return {}
        return {flag: True}

    def _recomputation(self) -> dict[str, Any]:
        """Return the arguments for activation checkpointing; empty without it.

        They are empty too where ``fsdp_config`` asks for it: under FSDP, but not for the re-entrant
        implementation, nor for a model that transformers shards itself.
        """
        mode = self.cell.option("activation_checkpointing")
        by_fsdp = "fsdp" in self.cell.strategy and not self.in_parts and mode != "reentrant"
        if not mode or by_fsdp:
            return {}
        return {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": _options.recomputation(self.cell),
        }

    def _compilation(self) -> dict[str, Any]:
        """Return the arguments for torch.compile; empty if Trainer is not to compile.

        Option ``compile`` is False, True (inductor), ``aot_eager``, ``regional`` (each block, by
        aot_eager; see ``environment``), or ``partial``: one block, which the driver compiles.
        """
        mode = self.cell.option("compile")
        if mode in {False, "partial"}:
            return {}
        backend = "inductor" if mode is True else "aot_eager"
        return {"torch_compile": True, "torch_compile_backend": backend}

    def environment(self) -> dict[str, str]:
        """Return environment variables for what TrainingArguments have no argument for.

        They are those that ``accelerate launch`` sets.
        """
        _, variables = self._backend_config()
        if self.precision.float8:
            variables["ACCELERATE_MIXED_PRECISION"] = "fp8"
            if self.cell.strategy != "fsdp2":
                # The default is for FSDP2 alone: docs/upstream/accelerate_fp8_untrained.py.
                variables["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] = "false"
        if self.cell.option("compile") == "regional":
            variables["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        return variables

    @classmethod
    def loads_best(cls, cell: Cell) -> bool:
        """Tell whether Trainer is to load the checkpoint with the lowest loss of an evaluation."""
        return _trainer_reasons.loads_best(cell)


def on_cpu(settings: Mapping[str, Any], *, in_parts: bool = False) -> dict[str, Any]:
    """Return the arguments by which ``TrainingArguments(**settings)`` run a strategy on CPU ranks.

    Args:
        settings: The arguments so far.
        in_parts: Whether transformers has sharded the model. Then the arguments name no strategy,
            and accelerate refuses the model's mesh while its state is one of CPUs.
    """
    from pytest_distcompat.launch import accelerate_cpu

    if settings.get("deepspeed") and settings.get("parallelism_config"):
        # DeepSpeed's sequence parallelism, Ulysses, makes process groups of the default one. On
        # GPUs accelerate initializes that before.
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    if not settings.get("fsdp") and not in_parts:
        # Without ``use_cpu`` DeepSpeed would assume a world size of 1.
        return {"use_cpu": True}
    # ``use_cpu`` alone silently turns FSDP into plain DDP. So accelerate's process-wide state is
    # set first, and ``use_configured_state``, a public option, makes Trainer use it.
    accelerate_cpu.on_cpu({"fsdp_plugin": settings.get("fsdp_config")})
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
