"""Driver for DeepSpeed's own API: ``deepspeed.initialize``, its engine and its checkpoints.

A driver is the class by which a trainer is tested. Each rank of a run makes a
``DeepSpeedDriver(cell, world)`` and calls its methods in the order of the run's actions:
``build_model``, ``build``, ``step`` ..., ``save``, ``load``, ``export``, ``evaluate``. After each
action a probe reads ``model`` (the engine), ``optimizer`` and ``scheduler``, which ``build`` sets.

A cell says what is trained: ``zero2-bf16_upcast-w2-grad_accum_2`` is ZeRO stage 2 with bfloat16
products and float32 master weights on two ranks. ``build`` makes DeepSpeed's JSON of it: the
backend config of ``strategies/zero.py``, with the cell's settings such as
``ds_config.zero_optimization.overlap_comm=false``. The engine then does much of a step itself: it
scales, reduces and clips gradients, and steps optimizer and scheduler.

The JSON may name another optimizer or schedule. Then the reference, which repeats the training in
one process without DeepSpeed, needs the same: ``make_optimizer`` and ``make_scheduler`` are for it.

The base classes have the rest: ``DeepSpeedCheckpoints`` (``_deepspeed_checkpoints.py``), and
``TinyDriver`` what all built-in drivers share (``tiny.py``). What the profile ``walk`` calls on the
live engine is in ``_deepspeed_calls.py``.

https://deepspeed.readthedocs.io/en/latest/initialize.html,
https://deepspeed.readthedocs.io/en/latest/training.html
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.ext.upstream.drivers import (
    _deepspeed_evaluation,
    _exchanges,
    _loaded,
    _options,
    _preload,
    _rows,
)
from pytest_distcompat.ext.upstream.drivers._deepspeed_calls import DeepSpeedCalls
from pytest_distcompat.ext.upstream.drivers._deepspeed_checkpoints import (
    DeepSpeedCheckpoints,
    saved_by_layer,
    saved_on,
)
from pytest_distcompat.ext.upstream.drivers.tiny import (
    DECAY,
    HELD_OUT_BATCH,
    LEARNING_RATE,
    batches_of_one_row,
)
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.launch.deepspeed_cpu import init_distributed
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.parallel import context_parallel, deepspeed_pipeline, expert_parallel
from pytest_distcompat.parallel.deepspeed_pipeline import DeepSpeedPipeline
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import ExtraState, Loader

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.driver import OnAction, Plan
    from pytest_distcompat.exchanges import Exchange
    from pytest_distcompat.models import Batch, TinyModel

__all__ = ["DeepSpeedCalls", "DeepSpeedDriver"]


class DeepSpeedDriver(DeepSpeedCheckpoints):
    """Training loop as in DeepSpeed's documentation.

    The class attributes are explained in ``driver.Driver`` and, ``sources``, in
    ``sweep.fields.Source``.
    """

    name: ClassVar[str] = "deepspeed"
    preload: ClassVar[tuple[str, ...]] = _preload.DEEPSPEED
    options: ClassVar[tuple[str, ...]] = (
        *_options.OF_ALL,
        "ep",
        "pp",
        "meta_init",
        "loaded",
        "param_groups",
        "grad_accum_dtype",
        "conflict",
    )
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "ds_config",
            "deepspeed.runtime.config.DeepSpeedConfig",
            ("zero1", "zero2", "zero3"),
            "keys",
        ),
        Source("initialize", "deepspeed.initialize", ("zero2", "zero3")),
        Source("save_checkpoint", "deepspeed.DeepSpeedEngine.save_checkpoint", ("zero2", "zero3")),
        Source("load_checkpoint", "deepspeed.DeepSpeedEngine.load_checkpoint", ("zero2", "zero3")),
        Source("PipelineModule", "deepspeed.pipe.PipelineModule", ("zero0", "zero1")),
        Source("checkpoint", "torch.utils.checkpoint.checkpoint", ("zero2", "zero3")),
        Source("AdamW", "torch.optim.AdamW", ("zero2", "zero3")),
        Source(
            "use_deterministic_algorithms", "torch.use_deterministic_algorithms", ("zero2", "zero3")
        ),
        Source("zero_init", "deepspeed.zero.Init", ("zero3",)),
        *_loaded.sources("zero3"),
    )
    libraries: ClassVar[tuple[str, ...]] = ("deepspeed", "torch")
    #: The strategies whose checkpoints load at another number of ranks: as universal checkpoints.
    reshards: ClassVar[tuple[str, ...]] = ("zero1", "zero2", "zero3")
    order: ClassVar[int] = 2
    live_calls: ClassVar[type[Calls]] = DeepSpeedCalls
    #: The engine's counters, by which it accumulates, schedules and logs.
    extra_state: ClassVar[Mapping[str, ExtraState]] = {
        "model.global_steps": ExtraState(),
        "model.global_samples": ExtraState(),
    }
    loaders: ClassVar[Mapping[str, Loader]] = _rows.DEEPSPEED
    # Values of option ``optimizer`` that can update flat partitions of many parameters, and those
    # that compile their own step. DeepSpeed's Muon knows which matrices a flat partition has parts
    # of, and is compiled.
    update_flat: ClassVar[tuple[str, ...]] = ("adamw", "sgd", "muon")
    compile_themselves: ClassVar[tuple[str, ...]] = ("adam8bit", "muon")
    # DeepSpeed takes a model in stages as a list of layers.
    needs_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **DeepSpeedCheckpoints.needs_options,
        "pp": {"model": "layers"},
    }

    #: While this ``HfDeepSpeedConfig`` lives, transformers makes models in parts under ZeRO-3:
    #: https://huggingface.co/docs/transformers/deepspeed. None where it makes no model.
    loading_config: Any = None
    #: Whether a checkpoint is loaded that a pipeline has saved.
    loads_layers = False
    #: The rows of which ``deepspeed.initialize`` makes a loader; None for a driver's own batches.
    training_data: Sequence[int] | None = None

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts.

        The strategy may be torch's, or DeepSpeed's JSON may have no word for an option.
        """
        if STRATEGIES.get(cell.strategy).deepspeed is None:
            yield f"native DeepSpeed is driven for ZeRO; {cell.strategy} is a strategy of torch"
        if cell.precision == "fp8" and cell.option("fp8_backend") == "te":
            yield "Transformer Engine is driven through accelerate"
        if cell.option("optimizer") == "muon":
            yield _untried_muon_reason(cell)
        if cell.option("conflict") and PRECISIONS.get(cell.precision).compute != "bfloat16":
            yield "the conflict is between float16 in the JSON and a precision in bfloat16"
        yield from super()._reasons(cell, device)

    @classmethod
    def _pipeline_reason(cls, cell: Cell, tiny: TinyModel) -> str | None:
        """Return why the cell's model cannot be trained in stages (``pp``); None if it can."""
        return deepspeed_pipeline.unsupported_reason(cell, tiny.layers)

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Do the plan, and find out first whether its checkpoint must be converted.

        One of another world size is loaded as a universal checkpoint, of which the engine must know
        when it is created.
        """
        # Ranks, and ranks that hold the model together. On disks of their own nodes not all files
        # can be counted, and no cell loads at another world size.
        saved_sizes = None if self.world.own_disks else saved_on(plan.load_from)
        own_sizes = (self.world.size, self.cell.tp * self.cell.pp)
        if "load" in plan.actions and saved_sizes not in {None, own_sizes}:
            # ``load`` writes the converted checkpoint into this directory, and reads it.
            self.universal = plan.save_to.parent / "universal"
        self.loads_layers = saved_by_layer(plan.load_from)
        super().train(model, plan, report)

    @property
    def in_stages(self) -> bool:
        """Tell whether a ``PipelineModule`` has the model.

        The checkpoint of a pipeline is loaded by one, if need be of a single stage.
        """
        return self.cell.pp > 1 or self.loads_layers

    def build(self, model: Module) -> None:
        """Create the engine around the model, with its optimizer and its scheduler."""
        import deepspeed

        init_distributed(self.world.backend)
        config = self._config()
        if self.cell.option("optimizer") == "muon":
            self.compile_nothing()
        # transformers makes the model (``own_model``).
        if self.cell.option("loaded").startswith("from"):  # type: ignore[union-attr]
            from transformers.integrations import HfDeepSpeedConfig

            self.loading_config = HfDeepSpeedConfig(config)
        self.raw = self._changed_in_place(self.own_model(model, config), config)
        if self.in_stages:
            assert self.tiny.layers is not None
            self.pipeline = DeepSpeedPipeline(self.tiny.layers, self.cell, self.raw)
        arguments = self.cell.with_settings("initialize", self._arguments(config))
        self.model, self.optimizer, _, self.scheduler = deepspeed.initialize(**arguments)
        if self.pipeline:
            self.pipeline.engine = self.model
            if self.cell.pp > 1:
                self.pp_group = self.pipeline.group
        mode = self.cell.option("compile")
        if mode:
            backend = "inductor" if mode is True else str(mode)
            self.model.compile(backend=backend)
        self.seed_rank()

    def _config(self) -> dict[str, Any]:
        """Return DeepSpeed's JSON for the cell."""
        assert self.strategy.deepspeed is not None
        config = dict(self.strategy.deepspeed(self.precision, self.cell))
        if self.universal is not None:
            config["checkpoint"] = {"load_universal": True}
        if self.cell.option("optimizer") == "muon":
            config["optimizer"] = self._json_entry("optimizer")
            # Each rank orthogonalizes whole matrices: with reduce_scatter the engine refuses.
            config["zero_optimization"] = {**config["zero_optimization"], "reduce_scatter": False}
        if self.in_stages:
            # A step is one batch, whose rows are the micro-batches of the pipeline.
            config["train_micro_batch_size_per_gpu"] = 1
            config["gradient_accumulation_steps"] = len(self.batch_of(0, 0)["labels"])
        return config

    def _changed_in_place(self, model: Module, config: dict[str, Any]) -> Module:
        """Make the changes to the model that DeepSpeed leaves to its user, and return it.

        Layers in float8, activation checkpointing, partitioned parameters, spread experts.

        Args:
            model: The model.
            config: DeepSpeed's JSON.
        """
        import deepspeed

        if self.precision.float8:
            model = _options.in_8_bits(model, self.world.device)
        self._recompute(model, config)
        if self.cell.option("meta_init"):
            # Parameters are partitioned one by one; the whole model need not fit into one rank's
            # memory.
            deepspeed.zero.Init(module=model, config_dict_or_path=config)
        if self.cell.ep > 1:
            expert_parallel.spread_by_deepspeed(model, self.cell.ep, self.world.rank)
        return model

    def _recompute(self, model: Module, config: Mapping[str, Any]) -> None:
        """Turn on activation checkpointing as the cell asks."""
        mode = self.cell.option("activation_checkpointing")
        blocks = self.wrap_spec.block_modules(model)
        if mode == "deepspeed":
            _options.recompute_by_deepspeed(blocks, config)
        elif mode:
            _options.recompute_by_model(model, blocks, self.cell)

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, in evaluation mode."""
        outputs = super().evaluate(model)
        self.forget_activations()
        return outputs

    def forget_activations(self) -> None:
        """Have DeepSpeed discard activations for which no backward pass comes.

        Its documentation asks that of evaluations, where ``deepspeed.checkpointing`` recomputes.
        """
        if self.cell.option("activation_checkpointing") == "deepspeed":
            import deepspeed

            deepspeed.checkpointing.reset()

    def _arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``deepspeed.initialize``.

        The engine makes the optimizer and the scheduler that the JSON names. Others are passed to
        it.

        Args:
            config: DeepSpeed's JSON.
        """
        model = self.pipeline.module if self.pipeline else self.raw
        arguments: dict[str, Any] = {"model": model, "config": config}
        if "optimizer" in config:
            arguments["model_parameters"] = self.groups(model)
        else:
            arguments["optimizer"] = self.make_optimizer(model)
        if "scheduler" not in config:
            if "optimizer" in config:
                # The engine calls this function with the optimizer that it has made.
                arguments["lr_scheduler"] = self.make_scheduler
            else:
                arguments["lr_scheduler"] = self.make_scheduler(arguments["optimizer"])
        if self.training_data is not None:
            arguments["training_data"] = self.training_data
        if self.cell.cp > 1:
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

            # By the object ``mpu`` the engine knows groups of ranks; here those of Ulysses.
            rows = config["train_micro_batch_size_per_gpu"]
            arguments["mpu"] = UlyssesSPAttentionHF.register_with_transformers(
                self.raw, "sdpa", self.cell.cp, rows, disable_in_eval=True
            )
        return arguments

    def make_optimizer(self, model: Module) -> Any:
        """Return the optimizer; for the reference, the one of torch that the JSON names.

        ``build`` calls it only where the JSON names none.
        """
        entry = self._json_entry("optimizer")
        if not entry:
            return super().make_optimizer(model)
        from torch import optim

        settings = entry["params"]
        # It chooses between DeepSpeed's AdamW and torch's.
        settings.pop("torch_adam", None)
        if entry["type"] == "Muon":
            return self.make_muon(model, **settings)
        optimizer_class = getattr(optim, entry["type"])
        return optimizer_class(self.groups(model), **settings)

    def make_muon(self, model: Module, **settings: Any) -> torch.optim.Optimizer:
        """Return DeepSpeed's Muon for the reference.

        Its matrices are whole there. AdamW updates vectors, embeddings and the last layer.
        """
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
        from torch.optim import AdamW

        self.compile_nothing()
        matrices = []
        others = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            # DeepSpeed's engine leaves out these names too.
            embeds = re.search("embed|lm_head", name)
            if parameter.dim() >= 2 and not embeds:
                matrices.append(parameter)
            else:
                others.append(parameter)
        groups: list[dict[str, Any]] = []
        if matrices:
            groups.append({"params": matrices, "use_muon": True, **settings})
        if others:
            groups.append({"params": others, "use_muon": False, **settings})
        optimizer: torch.optim.Optimizer = MuonWithAuxAdam(groups, adam_optimizer=AdamW)
        return optimizer

    def make_scheduler(self, optimizer: Any, every: int = 1) -> Any:
        """Return the scheduler; for the reference, the one that the JSON names.

        Its name is one of DeepSpeed's schedules, as ``LRRangeTest``, or else of torch's.
        """
        entry = self._json_entry("scheduler")
        if not entry:
            return super().make_scheduler(optimizer, every)
        from deepspeed.runtime import lr_schedules
        from torch.optim import lr_scheduler

        scheduler_class: Any = getattr(lr_schedules, entry["type"], None)
        if scheduler_class is None:
            scheduler_class = getattr(lr_scheduler, entry["type"])
            return scheduler_class(optimizer, **entry["params"])
        return _ScheduleOfEach(optimizer, scheduler_class, entry["params"])

    def _json_entry(self, key: str) -> dict[str, Any]:
        """Return the ``type`` and ``params`` that a cell puts into DeepSpeed's JSON.

        For example ``{"type": "SGD", "params": {"lr": 0.003, "momentum": 0.9}}``; empty if the cell
        names none. They come from the cell's settings of ``ds_config``, and from option
        ``optimizer`` at ``muon``.

        Args:
            key: ``optimizer`` or ``scheduler``.
        """
        config: dict[str, Any] = {}
        if self.cell.option("optimizer") == "muon":
            # DeepSpeed's own Muon alone knows which matrices a flat partition has parts of. Its own
            # AdamW would be compiled.
            settings = {"lr": LEARNING_RATE, "weight_decay": DECAY, "torch_adam": True}
            config["optimizer"] = {"type": "Muon", "params": settings}
        config = self.cell.with_settings("ds_config", config)
        entry: dict[str, Any] = config.get(key, {})
        return entry

    def groups(self, model: Module) -> Any:
        """Return what the optimizer is made of: parameters, or param groups.

        Experts are in groups of their own, which the engine demands.
        """
        groups = super().groups(model)
        # A model for this driver alone has DeepSpeed's layers of experts.
        if not self.tiny.driver:
            return groups
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return split_params_into_different_moe_groups_for_optimizer(
            {"params": groups, "name": "all"}
        )

    def step(self, number: int) -> float:
        """Run forward and backward of each micro-batch, then the engine's ``step``.

        The engine scales, reduces and clips gradients, and steps optimizer and scheduler.
        """
        if self.pipeline:
            return self._pipelined(number, self.pipeline)
        self.model.train()
        total = 0.0
        # With this setting at false ``step`` itself ends the accumulation, and the engine refuses
        # to be told of the last micro-batch.
        managed = self.cell.settings("ds_config").get("managed_gradient_accumulation", True)
        # Each micro-batch of the step, with whether it is the last.
        for batch, last in self.batches(number):
            if managed:
                # An epoch's last step has fewer micro-batches than the JSON says.
                self.model.set_gradient_accumulation_boundary(last)
            loss = self.micro_loss(batch)
            self.model.backward(loss / self.backward_divisor)
            total += float(loss.detach()) / self.accumulate
        self.model.step()
        self._note_norm()
        return total

    def _pipelined(self, number: int, pipeline: DeepSpeedPipeline) -> float:
        """Take the step on the rows of its batch, one by one through the pipeline.

        ``fed`` keeps the rows: the probe cannot see them on later stages, which get activations.
        """
        self.fed = batches_of_one_row([batch for batch, _ in self.batches(number)])
        loss = pipeline.step(self.fed)
        self._note_norm()
        return loss

    def _note_norm(self) -> None:
        """Keep the norm of the gradients before they were clipped; None if the engine has none."""
        norm = self.model.get_global_grad_norm()
        self.grad_norm = None if norm is None else float(norm)

    def outputs(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, on all stages of a pipeline."""
        if model is not self.model or self.pipeline is None:
            return super().outputs(model)
        batch = self.batch_of(HELD_OUT_BATCH, 0)
        return self.pipeline.outputs(batches_of_one_row([batch]))

    def micro_loss(self, batch: Batch) -> Any:
        """Return the loss of a micro-batch.

        Under context parallelism Ulysses gives each rank its part of the sequence.
        """
        if self.cell.cp > 1:
            return context_parallel.ulysses_loss(self.model, batch)
        return self.tiny.loss(self.model, batch)

    @property
    def backward_divisor(self) -> int:
        """Return what the loss is divided by before the backward pass; 1 without ``cp``.

        So the gradients are those of the loss itself. Under context parallelism (``cp``) each rank
        of a sequence adds the gradients of the whole loss, and only ZeRO-3 divides them by the
        number of all ranks (docs/upstream.md).
        """
        if self.strategy.shards:
            return 1
        return self.cell.cp

    def rows(self, _loader: str, count: int, *_: Any) -> _rows.Batches:
        """Yield the rows that the loader of ``training_data`` gives, for the check ``coverage``.

        On a mesh the engine of the cell makes the loader.
        """
        if self.cell.pp > 1:
            self.training_data = range(count)
            self.build(self.build_model())
            return _rows.deepspeed_pipeline_rows(self.model)
        if self._on_mesh(self.cell):
            self.build(self.build_model())
            return _rows.deepspeed_engine_rows(self.model, count)
        return _rows.deepspeed_rows(count, self.world.backend)

    @staticmethod
    def _on_mesh(cell: Cell) -> bool:
        """Tell whether the cell's ranks are on a mesh of several dimensions."""
        return cell.tp * cell.cp * cell.ep * cell.pp > 1

    @classmethod
    def evaluates_in(cls, cell: Cell) -> bool:
        """Tell whether ``metrics`` evaluates in the cell: not on a mesh, of which it makes none."""
        return not cls._on_mesh(cell)

    def metrics(self, count: int) -> Mapping[str, float]:
        """Evaluate by engines without an optimizer, for the check ``evaluation``."""
        return _deepspeed_evaluation.metrics(count, self.world.backend, self.world.device)

    def exchanges(self) -> Mapping[str, Exchange]:
        """Return DeepSpeed's functions by which ranks exchange values."""
        return _exchanges.of_deepspeed(self.world.backend)

    def trainer_world_size(self) -> int | None:
        """Return the engine's world size."""
        return int(self.model.world_size)


class _ScheduleOfEach:
    """A schedule of DeepSpeed for each param group alone.

    The reference is made of DeepSpeed's own schedule, and must not repeat what that does wrong with
    several groups.
    """

    def __init__(
        self, optimizer: Any, scheduler_class: Callable[..., Any], settings: Mapping[str, Any]
    ) -> None:
        self._schedulers: list[Any] = []
        for group in optimizer.param_groups:
            # The schedule changes the group itself.
            with_one_group = copy.copy(optimizer)
            with_one_group.param_groups = [group]
            self._schedulers.append(scheduler_class(with_one_group, **settings))

    def step(self) -> None:
        """Step the schedule of each group."""
        for scheduler in self._schedulers:
            scheduler.step()


def _untried_muon_reason(cell: Cell) -> str | None:
    """Return why DeepSpeed's own Muon is not tried in a cell; None if it is."""
    if cell.precision != "fp32":
        return (
            "DeepSpeed's Muon keeps momentum in the gradients' dtype, whatever else is in float32: "
            "it is tried in fp32 alone"
        )
    others = cell.without("model", "optimizer", "set").options
    if others:
        first, _ = others[0]
        return f"DeepSpeed's Muon is not tried with option {first!r} yet"
    return None
