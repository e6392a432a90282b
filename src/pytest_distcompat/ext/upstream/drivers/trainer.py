"""Driver for transformers.Trainer, which trains and saves in one call of ``Trainer.train``.

A driver is the class by which a trainer is tested. Each rank of a run makes a
``TrainerDriver(cell, world)`` and calls ``build_model``, then ``train(model, plan, report)``. The
plan has the run's actions, such as ``("build", "step", "step", "save", "step")``. Other drivers
have a method for each action. Trainer does all in one call, so that a callback
(``_trainer_callback.py``) reports each action when Trainer has done it; then a probe reads
``model``, ``optimizer`` and ``scheduler`` of the driver. After the plan the rank may call
``export``, ``evaluate``, or, in other runs, ``rows`` and ``metrics``.

A cell says what is trained: strategy, precision, number of ranks, options, as
``fsdp2-bf16_upcast-w2``. The base classes have the rest of the driver, one theme each:
``TrainerArguments`` makes TrainingArguments of the cell (``_trainer_arguments.py``),
``TrainerReference`` the same training without Trainer (``_trainer_reference.py``), ``TinyDriver``
what all built-in drivers share (``tiny.py``). Why cells cannot run is in ``_trainer_reasons.py``.

*In parts* is a model that transformers shards while it loads it, for tensor and expert parallelism:
the driver writes the whole model to files, and each rank reads its part.

A *setting* is an argument of the library that a cell changes; its id has it, as
``set_TrainingArguments.optim=sgd``. The sweep, which tests one after the other, finds settings in
the objects that ``sources`` names; it alone calls ``json_of`` and ``read_fsdp_config``, without any
rank.

TrainingArguments name the strategy:
https://huggingface.co/docs/transformers/main_classes/trainer,
https://huggingface.co/docs/transformers/fsdp, https://huggingface.co/docs/transformers/deepspeed
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pytest_distcompat import clock
from pytest_distcompat.driver import OnAction, Plan
from pytest_distcompat.ext.upstream.drivers import (
    _exchanges,
    _loaded,
    _mesh_rows,
    _options,
    _preload,
    _rows,
    _trainer_evaluation,
    _trainer_reasons,
)
from pytest_distcompat.ext.upstream.drivers._trainer_arguments import TrainerArguments
from pytest_distcompat.ext.upstream.drivers._trainer_callback import PlanDoneError, make_callback
from pytest_distcompat.ext.upstream.drivers._trainer_calls import TrainerCalls
from pytest_distcompat.ext.upstream.drivers.tiny import (
    HELD_OUT_BATCH,
    TinyDriver,
)
from pytest_distcompat.ext.upstream.models import loss_to_targets
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.models import TinyModel, model_of
from pytest_distcompat.parallel.mesh import distributed_config
from pytest_distcompat.scenario import MESH
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ExtraState, Loader

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.exchanges import Exchange

__all__ = ["TrainerCalls", "TrainerDriver"]

#: The names of models with which ``evaluate`` calls ``Trainer.predict``: they have one output, and
#: compute it of each row alone, with the same numbers on all ranks.
PREDICTED = frozenset({"llama", "llama_tied", "llama_dropout", "mlp", "dropout", "twice", "odd"})

#: How late, in seconds, rank 0 makes a directory that all ranks look for.
LATE = 0.5


class TrainerDriver(TrainerArguments):
    """Trainer as its users run it: it creates the optimizer and the scheduler itself.

    The class attributes are explained in ``driver.Driver`` and, ``sources``, in
    ``sweep.fields.Source``.
    """

    name: ClassVar[str] = "trainer"
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
    #: Of each: what settings begin with, the object with them, strategies of its cells, how to read
    #: it (by its parameters; by ``keys`` or ``environment`` variables that it asks for). FSDP's
    #: keys are read by TrainingArguments, its variables by accelerate's plugin.
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "TrainingArguments",
            "transformers.TrainingArguments",
            ("ddp", "fsdp2", "zero2"),
            becomes="pytest_distcompat.ext.upstream.drivers.trainer.json_of",
        ),
        # ZeRO-3 loads the best checkpoint into its engine, in which no rank has the whole model.
        Source(
            "TrainingArguments",
            "transformers.TrainingArguments",
            ("zero3",),
            only=("load_best_model_at_end", "save_total_limit"),
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

    #: The ``transformers.Trainer``; None before ``train``, and in the reference.
    trainer: Any = None
    #: The whole model's files, of which each rank loads its part; None for models not in parts.
    _model_files: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts.

        Trainer or TrainingArguments may lack an option, or crash on that kind of device.
        """
        if STRATEGIES.get(cell.strategy).transformers is None:
            yield f"Trainer has no {cell.strategy}"
        yield _trainer_reasons.trainer_reason(cell, device)
        in_parts = cell.tp * cell.ep > 1
        if in_parts and cell.strategy == "fsdp2":
            yield _trainer_reasons.in_parts_reason(cell)
        yield _options.unsupported_by_accelerate(cell, device)
        yield from super()._reasons(cell, device)
        if cell.tp > 1 and cell.strategy != "fsdp2":
            yield _options.AUTOTP

    @classmethod
    def plan_of(cls, tiny: TinyModel) -> Mapping[str, str]:
        """Return the plan by which layers are cut: transformers' own, of a model with experts."""
        return _trainer_reasons.LAYERS.get(tiny.name, tiny.tp_plan)

    @classmethod
    def experts_of(cls, tiny: TinyModel) -> str:
        """Return the experts of transformers' own plan."""
        return _trainer_reasons.EXPERTS.get(tiny.name, "")

    def build_model(self) -> Module:
        """Return the tiny model; under expert parallelism its experts become blocks to wrap.

        ``blocks`` are class names of modules that are wrapped one by one. transformers wraps each
        module of experts by itself.
        """
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

    def make_trainer(self, **settings: Any) -> Any:
        """Return a ``transformers.Trainer`` that samples in order, as the reference does."""
        from torch.utils.data import SequentialSampler
        from transformers import Trainer

        if hasattr(settings["args"], "train_sampling_strategy"):
            return Trainer(**settings)

        class InOrder(Trainer):  # type: ignore[misc]  # transformers is untyped here
            """Trainer before transformers 5: a method chooses the sampler, and the log is rounded.

            The log has four decimals of the loss, too few to compare it with the reference.
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
        """Return the rows by whose loss Trainer chooses its best checkpoint; None if it does not.

        They are four for each rank.
        """
        if not self.loads_best(self.cell):
            return None
        return self.dataset(self.world.size)[: self.world.size * 4]

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Do the plan in one call of ``Trainer.train``, in which a callback reports the actions.

        A plan with several trainings (``again``) is done in one call for each, of one Trainer.

        An error while the Trainer is created counts as one of the action ``build``. In a plan with
        a load ``build`` is reported here, before ``Trainer.train``; all that happens up to the
        first step then counts as ``load``.
        """
        from transformers.trainer_utils import get_last_checkpoint

        self.run_directory = plan.save_to.parent
        plan, *later_plans = plan.trainings()
        os.environ.update(self.environment())
        self.compile_nothing()
        model_class: Any = type(model)
        model = self.model_on_mesh(model)
        self._create_trainer(model, plan)
        checkpoint = None
        if "load" in plan.actions:
            # The probe reads the model of ``build`` before Trainer wraps it.
            self.model = self.trainer.model
            report("build")
            checkpoint = get_last_checkpoint(str(plan.load_from))
            if plan.loads_first:
                checkpoint = _first_checkpoint(plan.load_from)
            if checkpoint is None:
                raise FileNotFoundError(f"{plan.load_from} holds no directory checkpoint-N")
            if self.in_parts:
                # Trainer cannot resume a model in parts: training begins anew, from the weights
                # that were saved.
                plan = dataclasses.replace(plan, first_step=0)
                self._create_trainer(self.load_in_parts(model_class, checkpoint), plan)
                checkpoint = None
        self._train_by_plan(plan, report, checkpoint)
        for later_plan in later_plans:
            self.trainer.args.max_steps = later_plan.last_step
            saved = None
            if "load" in later_plan.actions:
                saved = get_last_checkpoint(str(later_plan.save_to))
            else:
                self.again()
            self._train_by_plan(later_plan, report, saved)

    def _train_by_plan(self, plan: Plan, report: OnAction, checkpoint: str | None) -> None:
        """Call ``Trainer.train`` once, with the callback that reports the plan's actions."""
        callback = make_callback(self, plan, report)
        self.trainer.add_callback(callback)
        resumption = self._resumption(checkpoint)
        # The callback raises it where the plan ends with a load: nothing else stops Trainer before
        # its first step.
        with contextlib.suppress(PlanDoneError), self._late_directories():
            self.trainer.train(**resumption)
        self.trainer.remove_callback(callback)

    @contextlib.contextmanager
    def _late_directories(self) -> Iterator[None]:
        """Make directories late on rank 0, as a busy disk does, if all ranks look for one.

        They look for the directory of the best checkpoint, and must wait for rank 0 before.
        """
        if not (self.loads_best(self.cell) and self.world.writes_first):
            yield
            return
        make = os.makedirs

        def make_late(name: str, *arguments: Any, **settings: Any) -> None:
            if not Path(name).exists():
                clock.sleep(LATE)
            make(name, *arguments, **settings)

        with mock.patch("os.makedirs", make_late):
            yield

    def again(self) -> None:
        """Do nothing: the next call of ``Trainer.train`` begins a training anew."""

    def _resumption(self, checkpoint: str | None) -> dict[str, Any]:
        """Return the arguments of ``Trainer.train``: the checkpoint to resume from, None for none.

        With the setting ``train.resume_from_checkpoint=true`` Trainer looks for its last checkpoint
        itself, in its output directory.
        """
        arguments: dict[str, Any] = {"resume_from_checkpoint": checkpoint}
        if checkpoint is not None:
            arguments = self.cell.with_settings("train", arguments)
            if arguments["resume_from_checkpoint"] is True:
                self._take_over(Path(checkpoint))
        return arguments

    @classmethod
    def keeps_saves(cls, cell: Cell) -> bool:
        """Tell whether Trainer is to keep more than its last checkpoint.

        The check ``restarts`` asks. The answer is no in cells with a setting of
        ``Trainer.train``: they resume from a checkpoint of another run, which is copied beside
        those that the limit counts (``_take_over``).
        """
        limit = cell.settings("TrainingArguments").get("save_total_limit")
        takes_over = bool(cell.settings("train"))
        return not takes_over and (limit is None or limit != 1)

    def _take_over(self, checkpoint: Path) -> None:
        """Copy a checkpoint of another run to where Trainer looks for its last one.

        One rank copies, on each node with a disk of its own; the others wait.
        """
        with self.trainer.args.main_process_first(local=self.world.own_disks):
            if self.world.writes_first:
                shutil.copytree(checkpoint, Path(self.trainer.args.output_dir) / checkpoint.name)

    def _create_trainer(self, model: Any, plan: Plan) -> None:
        """Create the Trainer of a model, and set ``trainer``."""
        from transformers import PrinterCallback, TrainingArguments

        # The arguments come first: once there are some, ``from_pretrained`` shards models under
        # ZeRO-3 (``own_model``).
        args = TrainingArguments(**self.arguments(plan))
        model = self.own_model(model)
        if self.cell.option("compile") == "partial":
            _options.compile_blocks("partial", self.wrap_spec.block_modules(model))
        collator = None
        if self.cell.option("packed"):
            collator = self.collator()
        # Models of transformers have a config, and return a loss if they get labels.
        computes_loss = hasattr(model, "config") and not self.tiny.without_loss
        loss_function = None
        if not computes_loss:
            loss_function = self._loss()
        self.trainer = self.make_trainer(
            model=model,
            args=args,
            train_dataset=self.dataset(self.cell.dp_size),
            eval_dataset=self._evaluated_rows(),
            data_collator=collator,
            compute_loss_func=loss_function,
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
            # Each rank has a directory of its own, as no process group tells them of a shared one
            # yet. Once there is a group, ``save_pretrained`` writes on rank 0 alone: so it is
            # called once, before.
            self._model_files = tempfile.TemporaryDirectory()
            whole_model: Any = model
            whole_model.save_pretrained(self._model_files.name)
        loaded: Module = self.load_in_parts(type(model), self._model_files.name)
        return loaded

    def load_in_parts(self, kind: Any, directory: str) -> Any:
        """Return a model of which each rank has read its part of the weights.

        ``distributed_config`` says how transformers cuts it: by layer and by expert.

        Args:
            kind: The model's class.
            directory: The files of the whole model.
        """
        return kind.from_pretrained(directory, distributed_config=distributed_config(self.cell))

    def collator(self, **settings: Any) -> Callable[[list[dict[str, torch.Tensor]]], Any]:
        """Return the collator that packs the rows of a batch into one row, for option ``packed``.

        The reference is trained on the rows as they are.

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
        """Return the loss function for a model that does not compute a loss itself.

        Trainer calls it with the model's outputs, the labels, and the number of rows in a step.
        """
        if self.tiny.without_loss:
            # The distance of the outputs from fixed targets.
            return lambda outputs, *_, **__: loss_to_targets(outputs)

        def loss(
            outputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None
        ) -> torch.Tensor:
            from torch.nn import functional

            # In transformers 4.50 an evaluation passes no number.
            items = len(labels) if num_items_in_batch is None else num_items_in_batch
            total = functional.cross_entropy(outputs.float(), labels, reduction="sum")
            return total / items

        return loss

    def dataset(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        """Return the rows, keyed by the argument names of the model."""
        return [_with_argument_names(row) for row in super().dataset(ranks)]

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, as Trainer predicts them."""
        # ``Trainer.predict`` is not for models of which each rank computes a part, nor for packed
        # rows. The reloaded model and the reference's have no Trainer.
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
        # Once for each rank, so that each rank computes these rows or equal ones.
        outputs = self.trainer.predict(rows * self.world.size).predictions
        if isinstance(outputs, tuple):
            outputs = outputs[0]
        return torch.from_numpy(outputs[:count])

    def rows(
        self, loader: str, count: int, start: tuple[int, int], directory: Path
    ) -> _rows.Batches:
        """Yield (epoch, numbers of the rows) of each batch, for the check ``coverage``.

        The arguments are those of ``driver.HasLoaders.rows``.
        """
        if self._on_mesh(self.cell):
            return _mesh_rows.rows_on_mesh(self, loader, count, start, directory)
        return _rows.trainer_rows(
            loader, count, start, directory, world=self.world.size, device=self.world.device
        )

    @classmethod
    def loaders_in(cls, cell: Cell) -> Mapping[str, Loader]:
        """Return the loaders that can be tested in the cell, by name.

        They are all, but on a mesh: none of a model without tokens, since the model itself shows
        its rows there.
        """
        if not cls._on_mesh(cell):
            return cls.loaders
        # On a mesh the model itself records the tokens that it gets, by which rows are told apart.
        reads_tokens = "transformers" in model_of(cell).preload
        if not reads_tokens:
            return {}
        return _mesh_rows.loaders(cell)

    @staticmethod
    def _on_mesh(cell: Cell) -> bool:
        """Tell whether the cell's ranks are on a mesh of several dimensions."""
        return any(name in MESH for name, _ in cell.options)

    @classmethod
    def evaluates_in(cls, cell: Cell) -> bool:
        """Tell whether ``metrics`` can evaluate in the cell: not on a mesh.

        Trainer makes a mesh around the model that it trains, and ``metrics`` evaluates a model of
        its own.
        """
        return not cls._on_mesh(cell)

    def metrics(self, count: int) -> Mapping[str, float]:
        """Evaluate by ``Trainer.evaluate``, for the check ``evaluation``."""
        device = self.world.device
        return {**_rows.trainer_metrics(count, device), **_trainer_evaluation.metrics(device)}

    def exchanges(self) -> Mapping[str, Exchange]:
        """Return transformers' functions by which ranks exchange values."""
        return _exchanges.of_trainer(self.world.device)

    def written_names(self, model: Module) -> Collection[str]:  # noqa: ARG002 - a model of the same class is written, with other values
        """Return the names that ``save_pretrained`` gives to the model's tensors.

        It is empty for a model that transformers writes under its own names.
        """
        if self.tiny.written_names is None:
            return ()
        return self.tiny.written_names()

    def loads_file(self, path: PurePath) -> bool:
        """Tell whether Trainer resumes from a file of a checkpoint.

        Beside what DeepSpeed loads it saves the weights for ``from_pretrained``.
        """
        return self.strategy.deepspeed is None or path.suffix != ".safetensors"

    def read_trainer(self) -> None:
        """Set the model, optimizer, scheduler and scaler that the Trainer has now.

        The callback calls it before each report: Trainer makes and wraps them in ``train``.
        """
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
    """Return a row keyed by the arguments of the model's forward, which Trainer calls by name."""
    by_argument = {}
    for name, value in row.items():
        # A classifier calls its features x.
        argument = "x" if name == "features" else name
        by_argument[argument] = value
    return by_argument


def _as_lists(row: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a row with lists of numbers, as a tokenizer gives them."""
    return {name: value.tolist() for name, value in row.items()}


def json_of(arguments: Any) -> dict[str, Any]:
    """Return what Trainer fills into the keys of DeepSpeed's JSON that are "auto".

    ``{"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, ...}``. ``sources`` names this
    function: it shows which keys of the JSON an argument of TrainingArguments changes.

    Args:
        arguments: ``TrainingArguments``.
    """
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
    """Have TrainingArguments read a dictionary as ``fsdp_config``, of FSDP1 and then of FSDP2.

    ``sources`` names this function: the sweep gives it a dictionary that records which keys are
    asked for. These are the settings of ``fsdp_config``.
    """
    from transformers import TrainingArguments

    for version in (1, 2):
        config["version"] = version
        # Values that it refuses do not matter: by then it has asked for the keys.
        with contextlib.suppress(Exception):
            TrainingArguments(use_cpu=True, fsdp=True, fsdp_config=config)
