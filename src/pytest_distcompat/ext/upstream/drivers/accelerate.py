"""Driver for accelerate: ``Accelerator.prepare``, ``save_state`` and ``load_state``.

A driver is the class by which a trainer is tested. Each rank of a run makes an
``AccelerateDriver(cell, world)`` and calls its methods in the order of the run's actions:
``build_model``, ``build``, ``step`` ..., ``save``, ``load``, ``export``. After each action a probe
reads ``model``, ``optimizer`` and ``scheduler``, which ``build`` has set. The base class
``TinyDriver`` (``tiny.py``) has what all built-in drivers share: the tiny model, its optimizer, its
batches, and the same training in one process as a reference.

A cell says what is trained: the cell ``fsdp2-bf16_upcast-w2-grad_accum_2`` becomes an Accelerator
with an FSDP2 plugin, mixed precision ``bf16`` and ``gradient_accumulation_steps=2``. The arguments
come from three places, a later one overrides an earlier one: the strategy's backend config
(``strategies/fsdp2.py`` and others), the cell's options, and the settings in its option ``set``, as
in ``set_DataLoaderConfiguration.even_batches=false``. ``sources`` lists the objects that may be
set in this way; ``cell.settings("save_state")`` returns the fields that the cell sets of one,
``{"safe_serialization": False}``, and ``cell.with_settings(name, arguments)`` lets them override
arguments.

What the profile ``walk`` calls on the live trainer in random order is in ``_accelerate_calls.py``.

https://huggingface.co/docs/accelerate/usage_guides/fsdp,
https://huggingface.co/docs/accelerate/usage_guides/deepspeed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.ext.upstream.drivers import _average, _exchanges, _options, _preload, _rows
from pytest_distcompat.ext.upstream.drivers._accelerate_calls import AccelerateCalls
from pytest_distcompat.ext.upstream.drivers._accelerator import MakesAccelerator
from pytest_distcompat.ext.upstream.drivers.tiny import listed
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.launch.accelerate_cpu import on_cpu
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.parallel import context_parallel, tensor_parallel
from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import MAX_NORM, STRATEGIES
from pytest_distcompat.trace import ExtraState, Loader

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.driver import OnAction, Plan
    from pytest_distcompat.exchanges import Exchange
    from pytest_distcompat.models import Batch

__all__ = ["AccelerateCalls", "AccelerateDriver"]


#: The cells with tensor parallelism (tp) that are tried, as (precision, *names of further options):
#: all without further options. They are declared as known failures
#: (docs/upstream/accelerate_tp_fsdp2.py), so that a fix is noticed.
TRIED_TP = {("fp32",), ("bf16_upcast",), ("bf16_pure",)}


class AccelerateDriver(MakesAccelerator):
    """Training loop as in accelerate's documentation.

    The class attributes are explained in ``driver.Driver`` and, ``sources``, in
    ``sweep.fields.Source``.
    """

    name: ClassVar[str] = "accelerate"
    preload: ClassVar[tuple[str, ...]] = _preload.ACCELERATE
    options: ClassVar[tuple[str, ...]] = (
        *_options.OF_ALL,
        *_options.OF_FSDP,
        "cpu_ram_efficient_loading",
        "loaded",
        "wrap_policy",
        "ignored_modules",
        "param_groups",
        "fp8_backend",
        "grad_accum_dtype",
        "conflict",
        "ema",
    )
    #: Of each object the name in settings, its import path, the strategies under which this driver
    #: makes it, and where its fields are if not in its signature: in its ``subclasses``, in a
    #: dictionary (``keys``), or in the ``environment``, variables that it reads when it is made.
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "FullyShardedDataParallelPlugin",
            "accelerate.FullyShardedDataParallelPlugin",
            ("fsdp1", "fsdp2"),
        ),
        Source(
            "DeepSpeedPlugin",
            "accelerate.DeepSpeedPlugin",
            ("zero2", "zero3"),
            # accelerate turns the plugin into DeepSpeed's JSON, which ``json_of`` returns.
            becomes="pytest_distcompat.ext.upstream.drivers.accelerate.json_of",
        ),
        Source("Accelerator", "accelerate.Accelerator", ("ddp", "fsdp2", "zero2")),
        Source(
            "GradientAccumulationPlugin",
            "accelerate.utils.GradientAccumulationPlugin",
            ("ddp", "fsdp2", "zero2"),
        ),
        Source(
            "DataLoaderConfiguration",
            "accelerate.DataLoaderConfiguration",
            ("ddp", "fsdp2", "zero2"),
        ),
        Source("TorchDynamoPlugin", "accelerate.utils.TorchDynamoPlugin", ("ddp", "fsdp2")),
        # Each subclass is a source of its own, named after itself.
        Source("", "accelerate.utils.dataclasses.KwargsHandler", ("ddp", "fsdp2"), "subclasses"),
        Source("ds_config", "deepspeed.runtime.config.DeepSpeedConfig", ("zero2",), "keys"),
        Source(
            "ProjectConfiguration",
            "accelerate.utils.ProjectConfiguration",
            ("ddp", "fsdp2", "zero2"),
        ),
        Source("prepare", "accelerate.Accelerator.prepare", ("ddp", "fsdp2", "zero2")),
        Source("save_state", "accelerate.Accelerator.save_state", ("ddp", "fsdp2", "zero2")),
        Source("save_model", "accelerate.Accelerator.save_model", ("ddp", "fsdp2", "zero3")),
        Source("checkpoint", "torch.utils.checkpoint.checkpoint", ("ddp", "zero2", "zero3")),
        Source("AdamW", "torch.optim.AdamW", ("ddp", "fsdp2", "zero2")),
        Source("SGD", "torch.optim.SGD", ("ddp", "fsdp2", "zero2")),
        Source("Adafactor", "torch.optim.Adafactor", ("ddp", "fsdp2")),
        Source("Muon", "torch.optim.Muon", ("ddp", "fsdp2")),
        Source("AdamW8bit", "torchao.optim.AdamW8bit", ("ddp", "fsdp2")),
        Source("LoraConfig", "peft.LoraConfig", ("ddp", "fsdp2", "zero3")),
        # The methods of PEFT by name; one may have fields of its own beside it.
        Source("PeftConfig", "peft.PeftConfig", ("ddp", "fsdp2", "zero2")),
        Source("Accelerator", "accelerate.Accelerator", ("ddp", "zero2"), "environment"),
        Source(
            "FullyShardedDataParallelPlugin",
            "accelerate.FullyShardedDataParallelPlugin",
            ("fsdp2",),
            "environment",
        ),
        Source("DeepSpeedPlugin", "accelerate.DeepSpeedPlugin", ("zero2",), "environment"),
        Source(
            "TorchDynamoPlugin", "accelerate.utils.TorchDynamoPlugin", ("fsdp2",), "environment"
        ),
    )
    libraries: ClassVar[tuple[str, ...]] = ("accelerate", "torch", "deepspeed")
    reshards: ClassVar[tuple[str, ...]] = ("ddp", "fsdp1", "fsdp2")
    portable: ClassVar[Mapping[str, str]] = {
        "fsdp1": "fsdp2",
        "zero1": "fsdp2",
        "zero2": "fsdp2",
        "zero3": "fsdp2",
    }
    order: ClassVar[int] = 1
    live_calls: ClassVar[type[Calls]] = AccelerateCalls
    #: The number by which accelerate accumulates, and what the driver registers. Each is expected
    #: to change in training, to be alike on all ranks, and to come back with a checkpoint.
    extra_state: ClassVar[Mapping[str, ExtraState]] = {
        "accelerator.step": ExtraState(),
        "progress": ExtraState(),
    }
    loaders: ClassVar[Mapping[str, Loader]] = _rows.ACCELERATE

    #: The ``Accelerator`` that ``build`` makes; None in the reference, which runs without one.
    accelerator: Any = None
    #: A ``_average.Progress``, which counts micro-batches. It stands for an object of the user's
    #: that accelerate saves and loads (``register_for_checkpointing``).
    progress: Any = None
    #: The endless iterator over the prepared loader; None before the first batch.
    _stream: Iterator[Batch] | None = None

    @classmethod
    def needs(cls, cell: Cell) -> tuple[str, ...]:
        """Return the modules and releases that the cell requires, as ``torch>=2.9``.

        They are those of every driver, and torchdata for a ``StatefulDataLoader``.
        """
        needed = super().needs(cell)
        if _is_stateful(cell):
            return (*needed, "torchdata")
        return needed

    @classmethod
    def extra_state_in(cls, cell: Cell) -> Mapping[str, ExtraState]:
        """Return what every cell has, and with option ``ema`` the average of the weights."""
        if not cell.option("ema"):
            return cls.extra_state
        # The reference, the same training in one process, keeps the average too.
        return {**cls.extra_state, "averaged_model": ExtraState(in_reference=True)}

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts."""
        strategy = STRATEGIES.get(cell.strategy)
        # The function that makes the arguments of Accelerator for the strategy.
        if strategy.accelerate is None:
            yield f"accelerate has no {cell.strategy}"
        # Option ``conflict`` has the DeepSpeed JSON ask for another precision than the Accelerator.
        if cell.option("conflict") and PRECISIONS.get(cell.precision).compute == "float32":
            yield "accelerate sets no precision for fp32, so the JSON cannot contradict it"
        # AutoTP is DeepSpeed's own tensor parallelism.
        autotp = cell.tp > 1 and strategy.zero_stage is not None
        if not autotp:
            yield _parallelism_reason(cell)
            yield _options.unsupported_by_accelerate(cell, device)
        if cell.option("ema"):
            yield _average.unsupported_by_accelerate(cell)
        yield from super()._reasons(cell, device)
        # Only the driver for DeepSpeed has it. Last: a cell with any other reason reports that one.
        if autotp:
            yield _options.AUTOTP

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Do the plan; an Accelerator that names checkpoints must know where when it is made."""
        self.save_to = plan.save_to
        super().train(model, plan, report)

    def build(self, model: Module) -> None:
        """Make one Accelerator, then prepare data, model, optimizer and scheduler together."""
        from accelerate.utils import set_seed

        self.accelerator = self._make_accelerator()
        # The model is made second: once there is an Accelerator, ``from_pretrained`` of
        # transformers makes it in shards under ZeRO-3 (option ``loaded``).
        own_model = self._changed_in_place(self.own_model(model))
        self._prepare(own_model)
        self.scaler = self.accelerator.scaler
        self._register()
        # Ranks draw different random numbers, so that dropout is not the same on all.
        set_seed(1, device_specific=True)

    def _changed_in_place(self, model: Module) -> Module:
        """Compile a block, checkpoint activations and shard for tensor parallelism, in place.

        Each is done only where the cell asks for it and accelerate leaves it to the user.
        """
        if self.cell.option("compile") == "partial":
            _options.compile_blocks("partial", self.wrap_spec.block_modules(model))
        self._recompute(model)
        if self.cell.tp > 1:
            # accelerate wants a model that tensor parallelism has sharded already:
            # https://huggingface.co/docs/accelerate/concept_guides/nd_parallelism
            mesh = self.accelerator.torch_device_mesh["tp"]
            spec = self.wrap_spec
            tensor_parallel.parallelize(model, mesh, spec.tp_plan, spec.experts, sequence=False)
        return model

    def _prepare(self, model: Module) -> None:
        """Make data, optimizer and scheduler for the model, and prepare all of them."""
        from torch.utils.data import DataLoader

        optimizers = listed(self.make_optimizer(model))
        if len(optimizers) > 1 and self.cell.strategy != "ddp":
            from pytest_distcompat.ext.upstream.drivers._joined import Joined

            # Option ``optimizer`` at ``muon`` has two, Muon and AdamW. Under FSDP and DeepSpeed
            # accelerate prepares several, and cannot save them:
            # docs/upstream/accelerate_two_optimizers.py. So they are made as one object, by a
            # function from param groups to the two.
            optimizers = [Joined(self.groups(model), self.muon_and_adamw)]
        # accelerate's scheduler takes a step for each rank:
        # https://huggingface.co/docs/accelerate/concept_guides/performance
        schedulers = self.make_scheduler(optimizers, every=self.world.size)
        # The rows of an epoch: micro-batch by micro-batch, rank by rank.
        data = self.dataset(self.cell.dp_size)
        # The rows of one micro-batch on one rank; ``epoch`` is the number of micro-batches in one.
        rows = len(data) // (self.epoch * self.cell.dp_size)
        # A list is a data set too.
        loader: DataLoader[Any] = DataLoader(data, batch_size=rows)  # type: ignore[arg-type]
        objects = (loader, model, *optimizers, *schedulers)
        # ``prepare`` returns the objects in the order in which it gets them.
        self.loader, self.model, *prepared = self.accelerator.prepare(
            *objects, **self.cell.settings("prepare")
        )
        count = len(optimizers)
        if count > 1:
            self.optimizer = prepared[:count]
            self.scheduler = prepared[count:]
        else:
            self.optimizer, self.scheduler = prepared

    def _register(self) -> None:
        """Register what accelerate is to save and load beside what it prepares."""
        self.progress = _average.Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        if self.cell.option("ema"):
            self.averaged_model = self.make_average(self.accelerator.unwrap_model(self.model))
            self.accelerator.register_for_checkpointing(self.averaged_model)

    def make_average(self, model: Module) -> Any:
        """Return an average that begins with the weights of a model, in the reference too."""
        return _average.AverageOfWeights(model)

    def update_average(self, model: Module) -> None:
        """Move the average towards the weights of a model."""
        self.averaged_model.update(model)

    def _recompute(self, model: Any) -> None:
        """Turn on activation checkpointing in the model, unless accelerate does so.

        For FSDP its plugin does, but not with the re-entrant implementation.
        """
        mode = self.cell.option("activation_checkpointing")
        if not mode or ("fsdp" in self.cell.strategy and mode != "reentrant"):
            return
        _options.recompute_by_model(model, self.wrap_spec.block_modules(model), self.cell)

    def micro_loss(self, batch: Batch) -> Any:
        """Return the loss of a micro-batch; under context parallelism of this rank's part of it."""
        # Of context parallelism only DeepSpeed's Ulysses runs here: ``_parallelism_reason``
        # excludes that of FSDP2.
        if self.cell.cp > 1:
            return context_parallel.ulysses_part_loss(self.model, batch)
        return self.tiny.loss(self.model, batch)

    def next_batch(self, done: int) -> Batch:
        """Return the next batch of the prepared loader, epoch after epoch.

        Args:
            done: How many batches the training has had. At the first call, as after a load, those
                of the current epoch are skipped.
        """
        if self._stream is None:
            self._stream = self._batches(done % self.epoch)
        return next(self._stream)

    def forget_stream(self) -> None:
        """Have ``next_batch`` iterate over the loader anew.

        Called when a walk (random calls of the live trainer) skips a batch or begins a new epoch.
        """
        self._stream = None

    def _batches(self, done: int) -> Iterator[Batch]:
        """Yield the batches of the prepared loader, epoch after epoch.

        Args:
            done: How many batches of the first epoch are skipped.
        """
        # torchdata's loader goes on by itself where it was saved.
        if done and not _is_stateful(self.cell):
            yield from self.accelerator.skip_first_batches(self.loader, done)
        while True:
            yield from self.loader

    def step(self, number: int) -> float:
        """Take a step as in accelerate's documentation, and return the loss.

        Optimizer, scheduler and ``zero_grad`` are called for each micro-batch. Their prepared forms
        do nothing until ``sync_gradients`` is true, which is in the last one of a step.
        """
        total = 0.0
        self.tokens = 0
        # The places in the epoch of this step's micro-batches: ``range(2, 4)``.
        micro_batches = self.micros(number)
        for _ in micro_batches:
            # The number of batches before this step counts only for the first batch of a run: then
            # the loader begins there.
            batch = self.next_batch(micro_batches.start)
            self.tokens += self._count(batch)
            with self.accelerator.accumulate(self.model):
                loss = self.micro_loss(batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                    # Under FSDP2 the norm is a DTensor, of which each rank has a part.
                    if hasattr(norm, "full_tensor"):
                        norm = norm.full_tensor()
                    self.grad_norm = None if norm is None else float(norm)
                for optimizer in listed(self.optimizer):
                    optimizer.step()
                for scheduler in listed(self.scheduler):
                    scheduler.step()
                for optimizer in listed(self.optimizer):
                    optimizer.zero_grad()
            self.progress.batches += 1
            total += float(loss.detach()) / self.accumulate
        # Only with option ``ema``.
        if self.averaged_model is not None:
            self.update_average(self.accelerator.unwrap_model(self.model))
        return total

    def _count(self, batch: Batch) -> int:
        """Return how many tokens or samples of a batch are trained on."""
        if self.cell.cp > 1:
            # Ulysses has shifted the labels already; those at -100 are not trained on.
            return int((batch["shift_labels"] != -100).sum())
        return self.tiny.count(batch)

    def make_scheduler(self, optimizer: Any, every: int = 1) -> Any:
        """Return the scheduler.

        By default accelerate steps a scheduler once for each rank at each optimizer step, so that
        ``every`` is the number of ranks, and 1 in the reference. With
        ``step_scheduler_with_optimizer=False`` each call is one step: then the reference decays as
        slowly as the ranks do.

        Args:
            optimizer: An optimizer, or a list of them.
            every: After how many calls the learning rate decays.
        """
        is_reference = self.accelerator is None
        if is_reference and not self._steps_with_optimizer:
            every = self.cell.world_size
        return super().make_scheduler(optimizer, every)

    def early_schedule_steps(self, number: int) -> int:
        """Return how often the scheduler steps before the optimizer does in a step; usually 0.

        The reference steps its scheduler so often before its optimizer. With
        ``step_scheduler_with_optimizer=False`` the scheduler steps in each micro-batch, the
        optimizer only in the last one.
        """
        if self._steps_with_optimizer:
            return 0
        return len(self.micros(number)) - 1

    @property
    def _steps_with_optimizer(self) -> bool:
        """Tell whether the scheduler takes a step for each rank whenever the optimizer steps."""
        return bool(self.setting_or_default(True, "Accelerator.step_scheduler_with_optimizer"))

    def save(self, directory: Path) -> None:
        """Save a checkpoint by ``save_state``, which may name it itself."""
        settings = self.cell.settings("save_state")
        if self._names_checkpoints(self.cell):
            self.accelerator.save_state(**settings)
        else:
            self.accelerator.save_state(str(directory), **settings)

    def load(self, directory: Path) -> None:
        """Load a checkpoint by ``load_state``: the last one where accelerate names them itself."""
        if self._names_checkpoints(self.cell):
            directory = _named_checkpoints(directory)[-1]
        self.accelerator.load_state(str(directory))

    @staticmethod
    def _names_checkpoints(cell: Cell) -> bool:
        """Tell whether accelerate itself names the directories of checkpoints, by counting them."""
        return bool(cell.settings("ProjectConfiguration").get("automatic_checkpoint_naming"))

    @classmethod
    def keeps_saves(cls, cell: Cell) -> bool:
        """Tell whether accelerate is to keep more than its last checkpoint."""
        limit = cell.settings("ProjectConfiguration").get("total_limit")
        return cls._names_checkpoints(cell) and (limit is None or limit > 1)

    def load_first(self, directory: Path) -> None:
        """Load the first of the checkpoints that accelerate has named.

        Called only in cells of which ``keeps_saves`` is true.
        """
        self.accelerator.load_state(str(_named_checkpoints(directory)[0]))

    def export(self, directory: Path) -> None:
        """Write the weights by ``save_model``, those of FSDP1 on CPU ranks by ``merge_shards``.

        Of a LoRA adapter only the adapter is written, by PEFT.
        """
        lora = bool(self.cell.option("lora"))
        if self.cell.strategy == "fsdp1" and self.world.device == "cpu":
            _options.merge_shards(self.accelerator, self.model, directory, lora=lora)
            return
        unwrapped = self.accelerator.unwrap_model(self.model)
        main = self.accelerator.is_main_process
        if lora:
            state = self.accelerator.get_state_dict(self.model)
            unwrapped.save_pretrained(directory, is_main_process=main, state_dict=state)
            return
        configured = hasattr(unwrapped, "config")
        arguments = {}
        if configured:
            # A model with a config is one of transformers. Its weights are written in several
            # files, as those of large models are; ``from_pretrained`` reads them.
            arguments = {"max_shard_size": "20KB"}
        arguments = self.cell.with_settings("save_model", arguments)
        self.accelerator.save_model(self.model, str(directory), **arguments)
        if main and configured:
            _options.write_config(unwrapped.config, directory)

    def rows(
        self, loader: str, count: int, start: tuple[int, int], directory: Path
    ) -> _rows.Batches:
        """Yield the rows that a prepared loader gives, for the check ``coverage``.

        Under Ulysses a prepared model is needed, which all loaders share.
        """
        if self.cell.cp > 1:
            if self.accelerator is None:
                self.build(self.build_model())
            # The length of a sequence, of which each rank gets a part.
            tokens = 2 * self.cell.cp
            return _rows.ulysses_rows(loader, count, self.accelerator, self.model, tokens)
        return _rows.accelerate_rows(
            loader,
            count,
            start,
            directory,
            device=self.world.device,
            parallel=self._mesh_settings(),
        )

    def metrics(self, count: int) -> Mapping[str, float]:
        """Evaluate with ``gather_for_metrics``, for the check ``evaluation``."""
        return _rows.accelerate_metrics(count, self.world.device, self._mesh_settings())

    def exchanges(self) -> Mapping[str, Exchange]:
        """Return accelerate's functions by which ranks exchange values."""
        return _exchanges.of_accelerate(self.world.device)

    @classmethod
    def evaluates_in(cls, cell: Cell) -> bool:
        """Tell whether ``metrics`` evaluates in the cell: not under Ulysses, without its model."""
        return cell.cp == 1

    def _mesh_settings(self) -> Mapping[str, Any]:
        """Return the arguments of Accelerator for the cell's mesh; empty if it has one dimension.

        For ``rows`` and ``metrics``, which have an Accelerator of their own: which rows a rank
        reads depends on the mesh.
        """
        if self.cell.strategy != "fsdp2":
            return {}
        assert self.strategy.accelerate is not None
        settings = dict(self.strategy.accelerate(self.precision, self.cell, self.wrap_spec))
        if "parallelism_config" not in settings:
            return {}
        if self.world.device == "cpu":
            settings |= on_cpu(settings)
        return settings

    @classmethod
    def loaders_in(cls, cell: Cell) -> Mapping[str, Loader]:
        """Return the loaders that can be tested in the cell.

        There are none under tensor parallelism of DeepSpeed.
        """
        if cell.cp > 1:
            return _rows.ulysses_loaders(cell.cp)
        if cell.strategy != "fsdp2" and cell.tp * cell.ep > 1:
            return {}
        prepared = _rows.accelerate_loaders(cell.dp_size)
        return {name: loader for name, loader in cls.loaders.items() if name in prepared}

    def trainer_world_size(self) -> int | None:
        """Return accelerate's number of processes."""
        return int(self.accelerator.num_processes)


def _parallelism_reason(cell: Cell) -> str | None:
    """Return why accelerate cannot run the cell's context or tensor parallelism; None if it can.

    DeepSpeed's tensor parallelism is not judged here.
    """
    # The options beside those that are judged elsewhere.
    other_options = cell.without("model", "tp", "set", "dp_replicate").options
    names_of_others = [name for name, _ in other_options]
    return first_reason(
        (
            cell.cp > 1 and cell.strategy == "fsdp2",
            _options.TORCH_CP,
        ),
        (
            cell.tp > 1 and cell.dp_size == int(cell.option("dp_replicate")),
            "accelerate's FSDP needs a dimension to shard over beside that of tensor parallelism",
        ),
        (
            cell.tp > 1 and (cell.precision, *names_of_others) not in TRIED_TP,
            (
                "accelerate cannot prepare tensor parallelism beside FSDP2 at all "
                "(docs/upstream.md), so nothing more is tried"
            ),
        ),
    )


def _named_checkpoints(directory: Path) -> list[Path]:
    """Return the directories of checkpoints that accelerate has named, the first one first.

    Their names are ``checkpoint_0``, ``checkpoint_1``, and so on.
    """
    # https://huggingface.co/docs/accelerate/usage_guides/checkpoint
    paths = (directory / "checkpoints").iterdir()
    return sorted(paths, key=lambda path: int(path.name.rpartition("_")[2]))


def _is_stateful(cell: Cell) -> bool:
    """Tell whether the cell has torchdata's ``StatefulDataLoader``, which saves its position."""
    return bool(cell.settings("DataLoaderConfiguration").get("use_stateful_dataloader"))


def json_of(plugin: Any) -> Mapping[str, Any]:
    """Return the JSON that a ``DeepSpeedPlugin`` has made of its arguments.

    ``sources`` names this function: it shows which keys of the JSON each argument changes.
    """
    config: Mapping[str, Any] = plugin.deepspeed_config
    return config
