"""Driver for transformers.Trainer, which trains and saves in one call of ``Trainer.train``.

TrainingArguments name the strategy:
https://huggingface.co/docs/transformers/main_classes/trainer,
https://huggingface.co/docs/transformers/fsdp, https://huggingface.co/docs/transformers/deepspeed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.driver import OnAction, Plan
from pytest_distcompat.ext.upstream.drivers import (
    _loaded,
    _mesh_rows,
    _options,
    _preload,
    _releases,
    _rows,
)
from pytest_distcompat.ext.upstream.drivers._trainer_callback import PlanDoneError, make_callback
from pytest_distcompat.ext.upstream.drivers._trainer_calls import TrainerCalls
from pytest_distcompat.ext.upstream.drivers.tiny import (
    DECAY,
    HELD_OUT_BATCH,
    LEARNING_RATE,
    TinyDriver,
)
from pytest_distcompat.ext.upstream.models import loss_to_targets
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.models import TinyModel, model_of
from pytest_distcompat.parallel.mesh import distributed_config
from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.scenario import MESH, STEPS
from pytest_distcompat.strategies import MAX_NORM, STRATEGIES
from pytest_distcompat.trace import ExtraState, Loader

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch

__all__ = ["TrainerCalls", "TrainerDriver"]

#: The only decaying schedule that does not depend on how many steps are left. Before transformers 5
#: the time scale is not passed on, and the rate hardly changes.
SCHEDULE: dict[str, Any] = {
    "lr_scheduler_type": "inverse_sqrt",
    "lr_scheduler_kwargs": {"timescale": 10},
}


#: How many rows of an evaluation a rank gets at a time.
EVALUATED_ROWS = 2

#: The models by which Trainer predicts: they have one output, and compute it of each row alone,
#: with the same numbers on all ranks.
PREDICTED = frozenset({"llama", "llama_tied", "llama_dropout", "mlp", "dropout", "twice", "odd"})

#: A number of steps that no training takes.
NEVER = 1_000_000

#: Option ``optimizer`` -> its name in TrainingArguments, which have none for Muon.
OPTIMIZERS = {
    "adamw": "adamw_torch",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "adam8bit": "adamw_torch_8bit",
}
#: Trainer's names of optimizers of torch -> torch's.
TORCH_OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


class TrainerDriver(TinyDriver):
    """Trainer as its users run it: it creates the optimizer and the scheduler itself."""

    name: ClassVar[str] = "trainer"
    mean: ClassVar[str] = "token"
    preload: ClassVar[tuple[str, ...]] = _preload.TRAINER
    options: ClassVar[tuple[str, ...]] = (
        *_options.OF_ALL,
        *_options.OF_FSDP,
        "ep",
        "cpu_ram_efficient_loading",
        "loaded",
        "wrap_policy",
        "save_only_model",
        "grad_accum_dtype",
        "conflict",
        "packed",
    )
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "TrainingArguments",
            "transformers.TrainingArguments",
            ("ddp", "fsdp2", "zero2"),
            becomes="pytest_distcompat.ext.upstream.drivers.trainer.json_of",
        ),
        Source(
            "fsdp_config",
            "pytest_distcompat.ext.upstream.drivers.trainer.read_fsdp_config",
            ("fsdp1", "fsdp2"),
            "keys",
        ),
        Source(
            "fsdp_config", "accelerate.FullyShardedDataParallelPlugin", ("fsdp2",), "environment"
        ),
        Source("checkpoint", "torch.utils.checkpoint.checkpoint", ("ddp", "zero2", "zero3")),
        Source("train", "transformers.Trainer.train", ("ddp", "fsdp2", "zero3")),
        *_loaded.sources("fsdp2", "zero3"),
    )
    needs_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **TinyDriver.needs_options,
        "tp": {"save_only_model": True},
        "ep": {"save_only_model": True, "model": "hf:gpt_oss"},
        "tp+ep": {"model": "hf:granitemoe_swa"},
    }
    libraries: ClassVar[tuple[str, ...]] = ("transformers", "accelerate", "torch", "deepspeed")
    reshards: ClassVar[tuple[str, ...]] = ("ddp", "fsdp1", "fsdp2")
    portable: ClassVar[Mapping[str, str]] = {"fsdp1": "fsdp2"}
    knows_directory: ClassVar[bool] = True
    order: ClassVar[int] = 3
    live_calls: ClassVar[type[Calls]] = TrainerCalls
    #: Where Trainer is in the training, by which it logs, saves and stops.
    extra_state: ClassVar[Mapping[str, ExtraState]] = {
        "trainer.state.global_step": ExtraState(),
        "trainer.state.epoch": ExtraState(),
    }
    loaders: ClassVar[Mapping[str, Loader]] = _rows.TRAINER

    trainer: Any = None
    #: The whole model's files, of which each rank loads its parts.
    _model_files: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts.

        Trainer or TrainingArguments may lack an option, or crash on that kind of device.
        """
        if STRATEGIES.get(cell.strategy).transformers is None:
            yield f"Trainer has no {cell.strategy}"
        yield _trainer_reason(cell, device)
        in_parts = cell.tp * cell.ep > 1
        if in_parts and cell.strategy == "fsdp2":
            yield _not_loaded_in_parts(cell)
        yield _options.unsupported_by_accelerate(cell, device)
        yield from super()._reasons(cell, device)
        if cell.tp > 1 and cell.strategy != "fsdp2":
            yield _options.AUTOTP

    @classmethod
    def plan_of(cls, tiny: TinyModel) -> Mapping[str, str]:
        """Return the plan by which layers are cut: transformers' own, of a model with experts."""
        return LAYERS.get(tiny.name, tiny.tp_plan)

    @classmethod
    def experts_of(cls, tiny: TinyModel) -> str:
        """Return the experts of transformers' own plan."""
        return EXPERTS.get(tiny.name, "")

    @property
    def in_parts(self) -> bool:
        """Tell whether transformers shards the model while it loads it."""
        return self.cell.tp * self.cell.ep > 1

    def build_model(self) -> Module:
        """Return the tiny model, and count experts of transformers' plan as blocks to wrap."""
        model = super().build_model()
        if self.cell.ep == 1:
            return model
        experts = self.experts_of(self.tiny)
        block_names = list(self.blocks)
        for name, module in model.named_modules():
            class_name = type(module).__name__
            if fnmatch(name, experts) and class_name not in block_names:
                block_names.append(class_name)
        self.blocks = tuple(block_names)
        return model

    def groups(self, model: Module) -> Any:
        """Return Trainer's own two param groups, for the reference.

        The second one has norms and biases, without weight decay.
        """
        from transformers import Trainer

        decay = self.setting_or_default(
            DECAY, "TrainingArguments.weight_decay", "ds_config.optimizer.params.weight_decay"
        )
        if not self.cell.option("use_orig_params"):
            # A flat parameter belongs to one group as a whole:
            # https://docs.pytorch.org/docs/stable/fsdp.html (use_orig_params).
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            return [{"params": trained, "weight_decay": decay}]
        # A public method that reads nothing of its Trainer.
        decayed_names = set(Trainer.get_decay_parameter_names(self, model))
        decayed = []
        undecayed = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name in decayed_names:
                decayed.append(parameter)
            else:
                undecayed.append(parameter)
        return [
            {"params": decayed, "weight_decay": decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]

    def make_scheduler(self, optimizer: torch.optim.Optimizer, every: int = 1) -> Any:  # noqa: ARG002 - Trainer's is of steps
        """Return the schedule of ``arguments`` for the reference, made as Trainer makes it."""
        from transformers import get_scheduler

        settings = SCHEDULE | self.cell.settings("TrainingArguments")
        # Before transformers 5 a fraction is an argument of its own.
        warmup = settings.get("warmup_steps", 0) or settings.get("warmup_ratio", 0)
        # Below one it is a fraction of all steps.
        warmup_steps = math.ceil(warmup * STEPS) if warmup < 1 else int(warmup)
        return get_scheduler(
            settings["lr_scheduler_type"],
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=STEPS,
            scheduler_specific_kwargs=settings["lr_scheduler_kwargs"],
        )

    def arguments(self, plan: Plan) -> dict[str, Any]:
        """Return the keyword arguments for TrainingArguments."""
        from transformers import TrainingArguments

        batch = self.tiny.batch(0, 0)
        settings: dict[str, Any] = {
            "output_dir": str(plan.save_to),
            "per_device_train_batch_size": len(next(iter(batch.values()))),
            "per_device_eval_batch_size": EVALUATED_ROWS,
            "gradient_accumulation_steps": self.accumulate,
            # With no step to go at the end of an epoch Trainer would return before its callback
            # sees the load.
            "max_steps": plan.last_step + (not plan.steps),
            "optim": OPTIMIZERS.get(str(self.cell.option("optimizer")), "adamw_torch"),
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
        if self.loads_best(self.cell):
            # A callback requests an evaluation, too, where the plan saves.
            steps = {"eval_strategy": "steps", "eval_steps": NEVER}
            settings |= {**steps, "save_strategy": "steps", "save_steps": NEVER}
        backend_arguments, _ = self._backend_config()
        settings |= backend_arguments
        settings |= self._mixed_precision()
        settings |= self._recomputation()
        settings |= self._compilation()
        if hasattr(TrainingArguments, "train_sampling_strategy"):
            settings["train_sampling_strategy"] = "sequential"
        if self.world.device == "cpu":
            settings |= on_cpu(settings, in_parts=self.in_parts)
        return self.cell.with_settings("TrainingArguments", settings)

    def _backend_config(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the strategy as arguments of TrainingArguments and as environment variables.

        The variables say what the installed release has no argument for. Tested with transformers
        4.50 to 5.23.
        """
        import transformers
        from packaging.version import Version

        assert self.strategy.transformers is not None
        arguments = dict(self.strategy.transformers(self.precision, self.cell, self.wrap_spec))
        overrides, variables = _releases.fsdp_for_release(
            arguments, Version(transformers.__version__)
        )
        return {**arguments, **overrides}, variables

    def _mixed_precision(self) -> dict[str, Any]:
        """Return the flag for mixed precision, which DeepSpeed's low-precision mode needs too."""
        mixed = self.precision.mixed and not self.precision.float8
        flag = {"bfloat16": "bf16", "float16": "fp16"}.get(self.precision.compute)
        if flag is None:
            return {}
        if not mixed and self.strategy.zero_stage is None:
            return {}
        return {flag: True}

    def _recomputation(self) -> dict[str, Any]:
        """Return the arguments for activation checkpointing, unless FSDP's are what asks for it."""
        mode = self.cell.option("activation_checkpointing")
        by_fsdp = "fsdp" in self.cell.strategy and not self.in_parts and mode != "reentrant"
        if not mode or by_fsdp:
            return {}
        return {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": _options.recomputation(self.cell),
        }

    def _compilation(self) -> dict[str, Any]:
        """Return the arguments for torch.compile, unless the driver compiles single blocks."""
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
        if self.cell.option("compile") == "regional":
            variables["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        return variables

    def make_trainer(self, **settings: Any) -> Any:
        """Return a ``transformers.Trainer`` that samples in order."""
        from torch.utils.data import SequentialSampler
        from transformers import Trainer

        if hasattr(settings["args"], "train_sampling_strategy"):
            return Trainer(**settings)

        class InOrder(Trainer):  # type: ignore[misc]  # transformers is untyped here
            """Trainer before transformers 5: a method chooses the sampler, and the log is rounded.

            It has four decimals of the loss.
            """

            _total_loss_scalar: float

            def _get_train_sampler(self, *_: Any) -> Any:
                return SequentialSampler(self.train_dataset)

            def log(self, logs: dict[str, float], *rest: Any) -> None:
                """Log the loss of the step as it was."""
                if "loss" in logs:
                    # The sum of the losses of the steps, which are logged one by one. Added up, a
                    # NaN would stay.
                    logs["loss"] = self._total_loss_scalar
                    self._total_loss_scalar = 0.0
                super().log(logs, *rest)

        return InOrder(**settings)

    def _evaluated_rows(self) -> list[dict[str, torch.Tensor]] | None:
        """Return the rows by whose loss Trainer chooses its best checkpoint, if it does."""
        if not self.loads_best(self.cell):
            return None
        return self.dataset(self.world.size)[: self.world.size * 4]

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Do the plan in one call of ``Trainer.train``, in which a callback reports the actions.

        An error while the Trainer is created is one of the build. With a checkpoint, all up to the
        first step is the load.
        """
        import os

        from transformers.trainer_utils import get_last_checkpoint

        self.run_directory = plan.save_to.parent
        os.environ.update(self.environment())
        self.compile_nothing()
        model_class: Any = type(model)
        model = self.model_on_mesh(model)
        self._create_trainer(model, plan)
        checkpoint = None
        if "load" in plan.actions:
            self.model = self.trainer.model
            report("build")
            checkpoint = get_last_checkpoint(str(plan.load_from))
            if plan.loads_first:
                checkpoint = _first_checkpoint(plan.load_from)
            if checkpoint is None:
                raise FileNotFoundError(f"{plan.load_from} holds no directory checkpoint-N")
            if self.in_parts:
                # Trainer cannot resume such a model: training begins anew, from the weights that
                # were saved.
                plan = dataclasses.replace(plan, first_step=0)
                self._create_trainer(self.load_in_parts(model_class, checkpoint), plan)
                checkpoint = None
        self.trainer.add_callback(make_callback(self, plan, report))
        resumption = self._resumption(checkpoint)
        with contextlib.suppress(PlanDoneError):
            self.trainer.train(**resumption)

    def _resumption(self, checkpoint: str | None) -> dict[str, Any]:
        """Return the arguments by which ``Trainer.train`` resumes from a checkpoint, if any."""
        arguments: dict[str, Any] = {"resume_from_checkpoint": checkpoint}
        if checkpoint is not None:
            arguments = self.cell.with_settings("train", arguments)
            if arguments["resume_from_checkpoint"] is True:
                self._take_over(Path(checkpoint))
        return arguments

    @classmethod
    def keeps_saves(cls, cell: Cell) -> bool:
        """Tell whether Trainer is to keep more than its last checkpoint."""
        limit = cell.settings("TrainingArguments").get("save_total_limit")
        takes_over = bool(cell.settings("train"))
        return not takes_over and (limit is None or limit != 1)

    @classmethod
    def loads_best(cls, cell: Cell) -> bool:
        """Tell whether Trainer is to load the checkpoint with the lowest loss of an evaluation."""
        return bool(cell.settings("TrainingArguments").get("load_best_model_at_end"))

    def _take_over(self, checkpoint: Path) -> None:
        """Copy a checkpoint of another run to where Trainer looks for its last one."""
        with self.trainer.args.main_process_first(local=self.world.own_disks):
            if self.world.writes_first:
                shutil.copytree(checkpoint, Path(self.trainer.args.output_dir) / checkpoint.name)

    def _create_trainer(self, model: Any, plan: Plan) -> None:
        """Create the Trainer of a model."""
        from transformers import PrinterCallback, TrainingArguments

        # Once there are arguments, transformers makes models in parts under ZeRO-3.
        args = TrainingArguments(**self.arguments(plan))
        model = self.own_model(model)
        if self.cell.option("compile") == "partial":
            _options.compile_blocks("partial", self.wrap_spec.block_modules(model))
        computes_loss = hasattr(model, "config") and not self.tiny.without_loss
        self.trainer = self.make_trainer(
            model=model,
            args=args,
            train_dataset=self.dataset(self.cell.dp_size),
            eval_dataset=self._evaluated_rows(),
            data_collator=self.collator() if self.cell.option("packed") else None,
            compute_loss_func=None if computes_loss else self._loss(),
            optimizer_cls_and_kwargs=self.optimizer_class(),
        )
        # It would print each log.
        self.trainer.remove_callback(PrinterCallback)
        if self.trainer.eval_dataset is not None:
            # Trainer looks for labels among the arguments of the model's forward, and model mlp has
            # none.
            self.trainer.label_names = ["labels"]

    def model_on_mesh(self, model: Module) -> Module:
        """Return the model as transformers loads it in parts, on a mesh; else the model itself."""
        if not self.in_parts:
            return model
        if self._model_files is None:
            # Once there is a process group, rank 0 alone writes files.
            self._model_files = tempfile.TemporaryDirectory()
            whole_model: Any = model
            whole_model.save_pretrained(self._model_files.name)
        loaded: Module = self.load_in_parts(type(model), self._model_files.name)
        return loaded

    def load_in_parts(self, kind: Any, directory: str) -> Any:
        """Return a model of that class, of whose weights each rank has read its part."""
        return kind.from_pretrained(directory, distributed_config=distributed_config(self.cell))

    def optimizer_class(self) -> tuple[Any, dict[str, Any]] | None:
        """Return the class and the arguments of an optimizer that TrainingArguments cannot name.

        None where they can.
        """
        if self.cell.option("optimizer") != "muon":
            return None
        from pytest_distcompat.ext.upstream.drivers._joined import Joined

        return Joined, {"make": self.muon_and_adamw}

    def make_optimizer(self, model: Module) -> Any:
        """Return the reference's optimizer, made as Trainer makes it."""
        class_with_arguments = self.optimizer_class()
        if class_with_arguments is not None:
            optimizer_class, class_arguments = class_with_arguments
            return optimizer_class(self.groups(model), **class_arguments)
        own_name = OPTIMIZERS[str(self.cell.option("optimizer"))]
        name = self.setting_or_default(own_name, "TrainingArguments.optim")
        if name == "adafactor":
            from transformers.optimization import Adafactor

            return self.make_with_settings(
                Adafactor, self.groups(model), scale_parameter=False, relative_step=False
            )
        if name not in TORCH_OPTIMIZERS:
            return super().make_optimizer(model)
        from torch import optim

        torch_class = getattr(optim, TORCH_OPTIMIZERS[name])
        arguments = _parsed(self.optimizer_arguments or "")
        return self.make_with_settings(torch_class, self.groups(model), **arguments)

    @property
    def optimizer_arguments(self) -> str | None:
        """Return the optimizer's own arguments, such as ``momentum=0.9,nesterov=true``.

        TrainingArguments spell them so. None if there are none.
        """
        default = "momentum=0.9" if self.cell.option("optimizer") == "sgd" else None
        arguments: str | None = self.setting_or_default(default, "TrainingArguments.optim_args")
        return arguments

    def make_with_settings(self, optimizer_class: Any, groups: Any, **arguments: Any) -> Any:
        """Return the reference's optimizer, with the cell's numbers.

        TrainingArguments or DeepSpeed's JSON may set them.
        """
        rate = self.setting_or_default(
            LEARNING_RATE, "TrainingArguments.learning_rate", "ds_config.optimizer.params.lr"
        )
        numbers = {"lr": rate}
        if optimizer_class.__name__.startswith("AdamW"):
            beta1 = self.setting_or_default(0.9, "TrainingArguments.adam_beta1")
            beta2 = self.setting_or_default(0.999, "TrainingArguments.adam_beta2")
            numbers["betas"] = (beta1, beta2)
            numbers["eps"] = self.setting_or_default(
                1e-8, "TrainingArguments.adam_epsilon", "ds_config.optimizer.params.eps"
            )
        return super().make_with_settings(optimizer_class, groups, **arguments, **numbers)

    @property
    def averaged_over(self) -> str:
        """Return ``rank`` where the cell has Trainer count the tokens of each rank alone."""
        across = self.setting_or_default(True, "TrainingArguments.average_tokens_across_devices")
        return self.mean if across else "rank"

    def reference_loss(self, model: Module, batch: Batch) -> torch.Tensor:
        """Return the loss, of labels as smooth as the cell has them."""
        smoothing = self.setting_or_default(0.0, "TrainingArguments.label_smoothing_factor")
        if not smoothing:
            return super().reference_loss(model, batch)
        from torch.nn import functional

        inputs = dict(batch)
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits
        # Each token but the last predicts the next one.
        logits = logits[:, :-1].float()
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing
        )

    def collator(self, **settings: Any) -> Callable[[list[dict[str, torch.Tensor]]], Any]:
        """Return the collator that packs rows into one; the reference is trained on the rows.

        https://huggingface.co/blog/packing-with-FA2

        Args:
            settings: Arguments of ``DataCollatorWithFlattening``.
        """
        from transformers import DataCollatorWithFlattening

        flatten = DataCollatorWithFlattening(**settings)

        def collate(rows: list[dict[str, torch.Tensor]]) -> Any:
            return flatten([_as_lists(row) for row in rows])

        return collate

    def _loss(self) -> Callable[..., torch.Tensor]:
        """Return the loss for a model that does not compute one."""
        if self.tiny.without_loss:
            return lambda outputs, *_, **__: loss_to_targets(outputs)

        def loss(
            outputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None
        ) -> torch.Tensor:
            from torch.nn import functional

            # In transformers 4.50 an evaluation has no number.
            items = len(labels) if num_items_in_batch is None else num_items_in_batch
            total = functional.cross_entropy(outputs.float(), labels, reduction="sum")
            return total / items

        return loss

    def dataset(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        """Return the rows, keyed by the argument names of the model."""
        return [_with_argument_names(row) for row in super().dataset(ranks)]

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, as Trainer predicts them."""
        apart = self.cell.cp > 1 or self.in_parts or bool(self.cell.option("packed"))
        if model is not self.model or apart or self.tiny.name not in PREDICTED:
            return super().evaluate(model)
        if self.trainer is None:
            return super().evaluate(model)
        return self.predictions()

    def predictions(self) -> torch.Tensor:
        """Return the outputs on the held-out batch by ``Trainer.predict``."""
        import torch

        batch = self.tiny.batch(HELD_OUT_BATCH, 0)
        inputs = {name: values for name, values in batch.items() if name != "labels"}
        count = len(next(iter(inputs.values())))
        rows = []
        for index in range(count):
            row = {name: values[index] for name, values in inputs.items()}
            rows.append(_with_argument_names(row))
        # As often as there are ranks, so that each rank computes these rows or equal ones.
        outputs = self.trainer.predict(rows * self.world.size).predictions
        if isinstance(outputs, tuple):
            outputs = outputs[0]
        return torch.from_numpy(outputs[:count])

    def rows(
        self, loader: str, count: int, start: tuple[int, int], directory: Path
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the rows that Trainer trains on."""
        if self._on_mesh(self.cell):
            return _mesh_rows.rows_on_mesh(self, loader, count, start, directory)
        return _rows.trainer_rows(
            loader, count, start, directory, world=self.world.size, device=self.world.device
        )

    @classmethod
    def loaders_in(cls, cell: Cell) -> Mapping[str, Loader]:
        """Return all loaders; on a mesh, those with data parallel ranks and a model of tokens."""
        if not cls._on_mesh(cell):
            return cls.loaders
        reads_tokens = "transformers" in model_of(cell).preload
        alone = cell.tp * cell.cp * cell.ep == cell.world_size
        if alone or cell.cp > 1 or not reads_tokens:
            return {}
        return _mesh_rows.loaders(in_parts=cell.tp * cell.ep > 1)

    @staticmethod
    def _on_mesh(cell: Cell) -> bool:
        """Tell whether the cell's ranks are on a mesh of several dimensions."""
        return any(name in MESH for name, _ in cell.options)

    @classmethod
    def evaluates_in(cls, cell: Cell) -> bool:
        """Return False on a mesh, which a training makes around its model."""
        return not cls._on_mesh(cell)

    def metrics(self, count: int) -> Mapping[str, float]:
        """Evaluate by ``Trainer.evaluate``."""
        return _rows.trainer_metrics(count, self.world.device)

    def written_names(self, model: Module) -> Collection[str]:  # noqa: ARG002 - one of its kind without its values is written
        """Return the names that ``save_pretrained`` gives to the model's tensors.

        There are none of a model that transformers writes without rules for names.
        """
        if self.tiny.written_names is None:
            return ()
        return self.tiny.written_names()

    def read_trainer(self) -> None:
        """Set the model, optimizer, scheduler and scaler that the Trainer has now."""
        trainer = self.trainer
        self.model = trainer.model_wrapped
        self.optimizer = trainer.optimizer
        self.scheduler = trainer.lr_scheduler
        self.scaler = trainer.accelerator.scaler

    def export(self, directory: Path) -> None:
        """Write the weights by ``save_model``, those of FSDP1 on CPU ranks by ``merge_shards``."""
        accelerator = self.trainer.accelerator
        if self.cell.strategy == "fsdp1" and self.world.device == "cpu":
            lora = bool(self.cell.option("lora"))
            _options.merge_shards(accelerator, self.trainer.model_wrapped, directory, lora=lora)
            return
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            # With sharded state dicts ``save_model`` silently writes nothing.
            plugin.set_state_dict_type("FULL_STATE_DICT")
        self.trainer.save_model(str(directory))

    def trainer_world_size(self) -> int | None:
        """Return Trainer's world size."""
        if self.trainer is None:
            return None
        return int(self.trainer.args.world_size)


def _first_checkpoint(directory: Path) -> str:
    """Return the path of the checkpoint of the lowest step."""
    steps = [int(path.name.rpartition("-")[2]) for path in directory.glob("checkpoint-*")]
    return str(directory / f"checkpoint-{min(steps)}")


def _with_argument_names(row: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a row keyed by the arguments of the model's forward."""
    by_argument = {}
    for name, value in row.items():
        # A classifier calls its features x.
        argument = "x" if name == "features" else name
        by_argument[argument] = value
    return by_argument


def _parsed(optimizer_arguments: str) -> dict[str, Any]:
    """Return the values by name of ``optim_args``, such as ``momentum=0.9,nesterov=true``."""
    values = {}
    for argument in optimizer_arguments.split(","):
        if argument:
            name, text = argument.split("=")
            values[name] = json.loads(text)
    return values


def _as_lists(row: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a row with lists of numbers, as a tokenizer gives them."""
    return {name: value.tolist() for name, value in row.items()}


#: Model -> the experts that transformers' plan spreads. The files of other models name each expert
#: by itself.
EXPERTS = {
    "hf:gpt_oss": "model.layers.*.mlp.experts",
    "hf:granitemoe_swa": "model.layers.*.block_sparse_moe.experts",
}
#: Model -> the layers that transformers' plan cuts, of those with experts; the plan of gpt_oss cuts
#: the last layer alone.
LAYERS = {
    "hf:granitemoe_swa": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }
}
#: Options that were tried on a model that transformers cuts while it loads it.
BESIDE = frozenset(
    {"model", "tp", "ep", "save_only_model", "grad_accum", "activation_checkpointing"}
)


def _trainer_reason(cell: Cell, device: str) -> str | None:
    """Return why Trainer itself cannot run the cell; None if it can."""
    model = cell.option("model")
    recomputed = cell.option("activation_checkpointing")
    fsdp = "fsdp" in cell.strategy
    recomputed_by_model = bool(recomputed) and (not fsdp or recomputed == "reentrant")
    transformers_model = "transformers" in model_of(cell).preload
    return first_reason(
        (
            bool(cell.option("param_groups")),
            "Trainer makes these two param groups anyway",
        ),
        (
            cell.option("reduce_dtype") != "auto" and fsdp,
            "TrainingArguments have no word for FSDP's policy of dtypes",
        ),
        (
            cell.option("fp8_backend") == "te",
            "Trainer passes no recipe for Transformer Engine to accelerate",
        ),
        (
            bool(cell.option("packed")) and not transformers_model,
            f"rows of tokens are packed, and model {model} has none",
        ),
        (
            recomputed_by_model and not transformers_model,
            (
                f"Trainer has the model recompute, and model {model} has no "
                "gradient_checkpointing_enable()"
            ),
        ),
        # It hangs, and a known issue never covers a hang.
        (
            cell.own_disks and fsdp,
            (
                "Trainer loads FSDP's optimizer where it finds the file that rank 0 wrote, so on "
                "one node, where it then waits"
            ),
        ),
        # It may hang, too.
        (
            TrainerDriver.loads_best(cell) and fsdp and cell.option("state_dict") != "full",
            (
                "Trainer looks for the directory of its best checkpoint before FSDP's sharded "
                "state dicts are written, and some ranks find it "
                "(docs/upstream/transformers_best_sharded.py)"
            ),
        ),
        (
            cell.cp > 1 and cell.strategy == "fsdp2",
            _options.TORCH_CP,
        ),
        (
            cell.cp > 1 and cell.dp_size > 1 and device == "cpu",
            (
                "Trainer gathers the losses of a sequence's parts, and the backward pass of that "
                "takes the ranks of a group for those of all on gloo: "
                "'Global rank 0 is not part of group'"
            ),
        ),
    )


def _not_loaded_in_parts(cell: Cell) -> str | None:
    """Return why transformers does not shard the model as the cell asks; None if it does."""
    model = cell.option("model")
    with_experts = ", ".join(EXPERTS)
    reason = first_reason(
        (
            "transformers" not in model_of(cell).preload,
            f"transformers cuts models of its own, and {model} is not one",
        ),
        (
            cell.ep > 1 and model not in EXPERTS,
            (
                f"of models whose experts transformers spreads, {with_experts} alone is tried, "
                f"and {model} is not it"
            ),
        ),
        (
            cell.ep > 1 and cell.precision != "fp32",
            f"which experts {model} chooses turns on rounding, and {cell.precision} rounds",
        ),
        (
            cell.ep > 1 and bool(cell.option("activation_checkpointing")),
            "transformers recomputes whole layers, and experts are blocks of their own",
        ),
        (
            cell.precision not in {"fp32", "bf16_upcast", "bf16_pure"},
            f"a model that is cut while it is loaded is not trained in {cell.precision} yet",
        ),
        (
            not cell.option("save_only_model"),
            (
                "Trainer saves the model alone: "
                "'Resuming is not supported for models sharded at load time'"
            ),
        ),
    )
    if reason is not None:
        return reason
    for name, _ in cell.options:
        if name not in BESIDE:
            return f"a model that is cut while it is loaded is not trained with option {name!r} yet"
    return None


def on_cpu(settings: Mapping[str, Any], *, in_parts: bool = False) -> dict[str, Any]:
    """Return the arguments by which ``TrainingArguments(**settings)`` run a strategy on CPU ranks.

    Args:
        settings: The arguments so far.
        in_parts: Whether transformers has sharded the model. It then runs under no strategy of
            accelerate, which refuses its mesh on what it takes for CPUs.
    """
    # ``use_cpu`` alone silently turns FSDP into plain DDP; without it DeepSpeed assumes a world
    # size of 1. For FSDP ``use_configured_state``, a public option, makes Trainer use the state
    # that ``launch.accelerate_cpu`` sets.
    from pytest_distcompat.launch import accelerate_cpu

    if settings.get("deepspeed") and settings.get("parallelism_config"):
        # On GPUs accelerate does it, before Ulysses makes its groups.
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    if not settings.get("fsdp") and not in_parts:
        return {"use_cpu": True}
    accelerate_cpu.on_cpu({"fsdp_plugin": settings.get("fsdp_config")})
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}


def json_of(arguments: Any) -> dict[str, Any]:
    """Return what Trainer fills into the keys of DeepSpeed's JSON that are "auto"."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    filled: dict[str, Any] = {}

    class Recorder(HfTrainerDeepSpeedConfig):  # type: ignore[misc]  # transformers is untyped here
        """A configuration that records instead of filling in."""

        def fill_match(self, key: str, value: Any, *_: Any, **__: Any) -> None:
            """Record the value of a key."""
            filled[key] = value

        fill_only = fill_match

    Recorder({"zero_optimization": {"stage": 2}}).trainer_config_process(arguments)
    return filled


def read_fsdp_config(config: dict[str, Any]) -> None:
    """Have TrainingArguments read a dictionary as ``fsdp_config``, of FSDP1 and then of FSDP2."""
    from transformers import TrainingArguments

    for version in (1, 2):
        config["version"] = version
        with contextlib.suppress(Exception):
            TrainingArguments(use_cpu=True, fsdp=True, fsdp_config=config)
