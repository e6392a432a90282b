"""Driver for plain torch: DDP, FSDP1 and FSDP2 by their own API.

A driver is the class by which a trainer is tested. Each rank of a run makes a
``TorchDriver(cell, world)`` and calls its methods in the order of the run's actions:
``build_model``, ``build``, ``step`` ..., ``save``, ``load``, ``export``, ``evaluate``. After each
action a probe reads ``model``, ``optimizer`` and ``scheduler``, which ``build`` has set.

A cell says what is trained: ``fsdp2-bf16_upcast-w4-tp_2`` is FSDP2 with bfloat16 products and
float32 master weights on four ranks, of which two hold each layer together. ``build`` wraps the
model as the strategy's backend config says (``strategies/fsdp2.py`` and others) and as the cell's
options say: compiled, recomputed, in 8 bits, in stages of a pipeline. ``step`` is the loop of
torch's tutorials: micro-batches, backward, clip, optimizer, scheduler.

The base classes have the rest: ``TorchCheckpoints`` saves, loads and exports
(``_torch_checkpoints.py``), ``TinyDriver`` has what all built-in drivers share (``tiny.py``):
``tiny`` (the model to train, with its batches and its loss), ``accumulate`` (micro-batches a step),
``batches(number)`` (those of a step, each with whether it is the last), ``wrap_spec`` (which
modules a strategy wraps one by one). What the profile ``walk`` calls on the live trainer is in
``_torch_calls.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pytest_distcompat.ext.upstream.drivers import _average, _options, _preload, _rows
from pytest_distcompat.ext.upstream.drivers._torch_calls import TorchCalls
from pytest_distcompat.ext.upstream.drivers._torch_checkpoints import TorchCheckpoints
from pytest_distcompat.ext.upstream.drivers.tiny import (
    HELD_OUT_BATCH,
    TinyDriver,
    batches_of_one_row,
    listed,
)
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.parallel import context_parallel, pipeline_parallel
from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.strategies import MAX_NORM, STRATEGIES
from pytest_distcompat.trace import ExtraState, Loader

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch

__all__ = ["TorchCalls", "TorchDriver"]


#: The package that ``sources`` names several times.
_DCP = "torch.distributed.checkpoint"


class TorchDriver(TorchCheckpoints):
    """Training loop as in torch's tutorials.

    The class attributes are explained in ``driver.Driver`` and, ``sources``, in
    ``sweep.fields.Source``.
    """

    name: ClassVar[str] = "torch"
    preload: ClassVar[tuple[str, ...]] = _preload.TORCH
    options: ClassVar[tuple[str, ...]] = (
        *_options.OF_ALL,
        *_options.OF_FSDP,
        "sp",
        "ep",
        "pp",
        "pp_schedule",
        "meta_init",
        "ignored_modules",
        "param_groups",
        "save_only_model",
        "async_save",
        "ema",
    )
    sources: ClassVar[tuple[Source, ...]] = (
        Source("DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel", ("ddp",)),
        Source(
            "FullyShardedDataParallel",
            "torch.distributed.fsdp.FullyShardedDataParallel",
            ("fsdp1",),
        ),
        Source(
            "MixedPrecision",
            "torch.distributed.fsdp.MixedPrecision",
            ("fsdp1",),
            precision="bf16_upcast",
        ),
        Source("fully_shard", "torch.distributed.fsdp.fully_shard", ("fsdp2",)),
        Source(
            "MixedPrecisionPolicy",
            "torch.distributed.fsdp.MixedPrecisionPolicy",
            ("fsdp2",),
            precision="bf16_upcast",
        ),
        Source("prefetch", "pytest_distcompat.strategies.fsdp2.Prefetch", ("fsdp2",)),
        Source("CPUOffloadPolicy", "torch.distributed.fsdp.CPUOffloadPolicy", ("fsdp2",)),
        Source(
            "StateDictOptions",
            "torch.distributed.checkpoint.state_dict.StateDictOptions",
            ("ddp", "fsdp1", "fsdp2"),
        ),
        Source("DefaultSavePlanner", f"{_DCP}.DefaultSavePlanner", ("ddp", "fsdp1", "fsdp2")),
        Source("DefaultLoadPlanner", f"{_DCP}.DefaultLoadPlanner", ("ddp", "fsdp1", "fsdp2")),
        Source("FileSystemWriter", f"{_DCP}.FileSystemWriter", ("ddp", "fsdp2")),
        Source("clip_grad_norm_", "torch.nn.utils.clip_grad_norm_", ("ddp", "fsdp2")),
        Source("compile", "torch.compile", ("ddp", "fsdp2")),
        Source("checkpoint", "torch.utils.checkpoint.checkpoint", ("ddp", "fsdp1", "fsdp2")),
        Source("AdamW", "torch.optim.AdamW", ("ddp", "fsdp1", "fsdp2")),
        Source("SGD", "torch.optim.SGD", ("ddp", "fsdp1", "fsdp2")),
        Source("Adafactor", "torch.optim.Adafactor", ("ddp", "fsdp2")),
        Source("Muon", "torch.optim.Muon", ("ddp", "fsdp2")),
        Source("AdamW8bit", "torchao.optim.AdamW8bit", ("ddp", "fsdp2")),
    )
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    # With four ranks of tensor parallelism the model must be ``mlp``: the llama has too few heads.
    needs_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **TinyDriver.needs_options,
        "tp_4": {"model": "mlp"},
    }
    # Strategies whose checkpoints load on another number of ranks, and those whose checkpoints load
    # under another strategy.
    reshards: ClassVar[tuple[str, ...]] = ("ddp", "fsdp1", "fsdp2")
    portable: ClassVar[Mapping[str, str]] = {
        "ddp": "fsdp2",
        "fsdp1": "fsdp2",
        "fsdp2": "ddp",
    }
    order: ClassVar[int] = 0
    live_calls: ClassVar[type[Calls]] = TorchCalls
    loaders: ClassVar[Mapping[str, Loader]] = _rows.TORCH

    #: The ranks that hold the parts of each sequence; None without context parallelism.
    context: Any = None
    #: The model inside torch.compile's wrapper, with the methods of its strategy.
    wrapped: Any = None

    @classmethod
    def extra_state_in(cls, cell: Cell) -> Mapping[str, ExtraState]:
        """Return what every cell has, and the average of the weights in a cell that has one."""
        if not cell.option("ema"):
            return cls.extra_state
        return {**cls.extra_state, "averaged_model": ExtraState(in_reference=True)}

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts.

        ``first_reason`` takes pairs (condition, reason), and returns the first reason that applies.
        """
        hybrid_fsdp1 = cell.strategy == "fsdp1" and cell.option("dp_replicate") != 1
        one_file = cell.option("state_dict") == "full"
        yield first_reason(
            (
                STRATEGIES.get(cell.strategy).torch is None,
                f"plain torch has no {cell.strategy}; it is a strategy of DeepSpeed",
            ),
            (
                cell.precision == "fp8" and cell.option("fp8_backend") == "te",
                "Transformer Engine is driven through accelerate",
            ),
            (
                hybrid_fsdp1 and not cell.option("reshard_after_forward"),
                "FSDP1's hybrid sharding without resharding after forward has a private name only",
            ),
            (
                bool(cell.option("async_save")) and (device != "cpu" or one_file or cell.own_disks),
                "async_save is for sharded checkpoints, and needs gloo",
            ),
            (
                cell.own_disks and "fsdp" in cell.strategy and not one_file,
                (
                    "torch.distributed.checkpoint writes the metadata of shards on rank 0 alone "
                    "(its use_collectives=False is experimental, and not driven); "
                    "state_dict='full' is one file"
                ),
            ),
        )
        if cell.option("ema"):
            yield _average.unsupported_by_torch(cell)
        yield from super()._reasons(cell, device)

    def build(self, model: Module) -> None:
        """Create process group, wrapper and optimizer, in the order of torch's documentation.

        The optimizer comes after the wrapper, whose parameters it updates.
        """
        import torch
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        device = torch.device(self.world.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not distributed.is_initialized():
            distributed.init_process_group(self.world.backend)
        if self.cell.option("async_save"):
            # A checkpoint is written while steps go on: its collectives must not pair with theirs.
            self.saving_group = distributed.new_group(backend="gloo")
        if self.cell.cp > 1:
            sizes = (self.cell.dp_size, self.cell.cp, self.cell.tp)
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "cp", "tp"))
            self.context = mesh["cp"]
        # The unwrapped model, for the export.
        self.raw = model
        if self.cell.option("ema"):
            # Before it is wrapped: FSDP2 refuses to copy a model.
            self.averaged_model = self.make_average(model)
        if self.cell.pp > 1:
            self._build_stages(model, device)
        else:
            self.model = self._wrap(model, device)
        if self.averaged_model is not None:
            self._place_average(device)
        self.optimizer = self.make_optimizer(self.model)
        self.scheduler = self.make_scheduler(self.optimizer)
        self.scaler = self._scaler(device.type) if self.precision.scaled else None
        # Another seed on each data-parallel rank, so that dropout differs.
        self.seed_rank()

    def _place_average(self, device: torch.device) -> None:
        """Shard the average of the weights as the model is, or move it to the device."""
        if self.strategy.wrapper == "FSDP2":
            self.averaged_model.module = self._wrap(self.averaged_model.module, device)
        self.averaged_model.to(device)

    def _build_stages(self, model: Module, device: torch.device) -> None:
        """Keep this rank's stages of the model, wrap each and connect them to the others."""
        assert self.tiny.stages is not None
        # Checkpoints have the optimizer's state by names of parameters alone: each stage has param
        # groups of its own.
        self.flat = True
        self.pipeline = pipeline_parallel.Pipeline(self.tiny.stages, self.cell, device)
        self.pp_group = self.pipeline.group
        modules = {}
        for number, stage in self.pipeline.keep(model).items():
            modules[number] = self._wrap(stage, device)
        if len(modules) == 1:
            (self.model,) = modules.values()
        else:
            # Wrapped in place: the model has the parameters of all stages.
            self.model = model
        # Without an example row torch finds out the shapes between stages by a forward and backward
        # pass, which DDP does not survive (docs/upstream.md).
        row = None
        if self.strategy.wrapper == "DDP":
            row = batches_of_one_row([self.batch_of(0, 0)])[0]
        self.pipeline.connect(modules, row)

    def _wrap(self, model: Module, device: torch.device) -> Module:
        """Return the model as the strategy and the cell's options wrap it."""
        assert self.strategy.torch is not None
        mode = self.cell.option("compile")
        by_block = mode in {"regional", "partial"}
        if self.precision.float8:
            model = _options.in_8_bits(model, device.type)

        # The strategy calls it before, between or after its own wrapping, as its library wants.
        def prepare(model: Module) -> None:
            blocks = self.wrap_spec.block_modules(model)
            if self.cell.option("activation_checkpointing"):
                _options.recompute(model, blocks, self.cell)
            if by_block:
                _options.compile_blocks(mode, blocks)

        wrap = dataclasses.replace(self.wrap_spec, prepare=prepare)
        self.wrapped = self.strategy.torch(model, self.precision, self.cell, device, wrap)
        if mode and not by_block:
            return cast("Module", _options.compiled(self.wrapped, self.cell))
        return cast("Module", self.wrapped)

    def _scaler(self, device: str) -> Any:
        """Return the gradient scaler for fp16.

        Args:
            device: Kind of the ranks' devices.
        """
        import torch
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        scaler_class: Any = torch.amp.GradScaler
        if self.cell.strategy == "fsdp1":
            # All ranks that hold shards must know about an overflow on one of them.
            scaler_class = ShardedGradScaler
        return scaler_class(device, init_scale=2.0**10)

    def step(self, number: int) -> float:
        """Run each micro-batch, reduce gradients in the last one, then update parameters."""
        # One optimizer, or two if Muon leaves some parameters to AdamW.
        for optimizer in listed(self.optimizer):
            optimizer.zero_grad()
        if self.pipeline:
            return self._pipelined(number)
        total = 0.0
        for batch, last in self.batches(number):
            with (
                self._synchronised(last),
                self._autocast(),
                context_parallel.attending(self.model, self.context),
            ):
                loss = self.micro_loss(batch) / self.accumulate
                scaled: Any = loss
                if self.scaler:
                    scaled = self.scaler.scale(loss)
                scaled.backward()
            total += float(loss.detach())
        self.update()
        return total

    def _pipelined(self, number: int) -> float:
        """Take the step on the rows of all micro-batches, one by one through the pipeline.

        ``fed`` keeps the rows: the probe cannot see them on later stages, which get activations.
        """
        import torch

        batches = [batch for batch, _ in self.batches(number)]
        self.fed = batches_of_one_row(batches)
        rows: Batch = {}
        for name in self.fed[0]:
            rows[name] = torch.cat([row[name] for row in self.fed])
        # The last step of an epoch has fewer rows, and is divided by the full count too.
        rows_of_full_step = self.accumulate * len(self.fed) // len(batches)
        with self._autocast():
            total: float = self.pipeline.step(rows, rows_of_full_step)
        self.update()
        return total

    def micro_loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a micro-batch, under context parallelism of this rank's part of it."""
        if self.context:
            return context_parallel.loss_of(self.model, self.context, batch)
        return self.tiny.loss(self.model, batch)

    def update(self) -> None:
        """Clip gradients, then step optimizer and scheduler."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        self.grad_norm = self._clip()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            for optimizer in listed(self.optimizer):
                optimizer.step()
        for scheduler in listed(self.scheduler):
            scheduler.step()
        if self.averaged_model is not None:
            self.update_average(self.model)
        if self.saving:
            # A checkpoint that began before this step: the step must not disturb it.
            self.saving.result()
            self.saving = None

    def make_average(self, model: Module) -> Any:
        """Return torch's average of a model that nothing wraps yet, in the reference too."""
        return _average.averaged(model)

    def update_average(self, model: Module) -> None:
        """Move the average towards the weights of a model, which FSDP1 gathers for it."""
        with _average.gathered_weights(model):
            self.averaged_model.update_parameters(model)

    def _clip(self) -> float:
        """Clip gradients, and return their norm over all ranks before that."""
        from torch.nn.utils import clip_grad_norm_

        if self.strategy.wrapper == "FSDP1":
            return float(self.wrapped.clip_grad_norm_(MAX_NORM))
        # Then parameters are on different meshes, whose norms torch's function cannot add up.
        if self.cell.tp * self.cell.ep * self.cell.pp > 1:
            return _options.clip_on_meshes(self.model.parameters(), MAX_NORM, self.pp_group)
        settings = self.cell.with_settings("clip_grad_norm_", {"max_norm": MAX_NORM})
        norm: Any = clip_grad_norm_(self.model.parameters(), **settings)
        if hasattr(norm, "full_tensor"):
            # The norm of DTensors is a DTensor too, of which each rank has a part.
            norm = norm.full_tensor()
        return float(norm)

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which gradients are reduced in the last micro-batch only."""
        if self.strategy.wrapper == "FSDP2":
            self.wrapped.set_requires_gradient_sync(last)
            return contextlib.nullcontext()
        if last:
            return contextlib.nullcontext()
        skipping: contextlib.AbstractContextManager[Any] = self.wrapped.no_sync()
        return skipping

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return autocast for DDP, which has no mixed precision of its own.

        For other strategies it is a context that does nothing.
        """
        import torch

        if self.strategy.wrapper != "DDP" or not self.precision.mixed:
            return contextlib.nullcontext()
        return torch.autocast(
            torch.device(self.world.device).type, dtype=getattr(torch, self.precision.compute)
        )

    def rows(
        self, loader: str, count: int, start: tuple[int, int], directory: Path
    ) -> _rows.Batches:
        """Yield the rows that torch's loader gives, for the check ``coverage``."""
        rank = self.cell.dp_rank(self.world.rank)
        if loader not in _rows.TORCH_STATEFUL:
            return _rows.torch_rows(loader, count, start, rank, self.cell.dp_size)
        from pytest_distcompat.ext.upstream.drivers import _iterables

        part = (rank, self.cell.dp_size)
        file = self.state_file(start)
        return _iterables.rows(loader, count, start, directory, part=part, file=file)

    def state_file(self, start: tuple[int, int]) -> str:  # noqa: ARG002 - for those who override it
        """Return the name of this rank's states of loaders; those of all ranks differ.

        Args:
            start: The epoch and the batch with which reading begins.
        """
        return str(self.world.rank)

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, in evaluation mode.

        Gradients are zeroed before: recompiled for evaluation, FSDP1 fails on a step's sharded
        ones.
        """
        for optimizer in listed(self.optimizer):
            # None in a run that reloads an exported model, and has no trainer.
            if optimizer:
                optimizer.zero_grad()
        if not self.cell.option("float32_norms"):
            return super().evaluate(model)
        # A model of two dtypes runs under autocast only.
        with self._autocast():
            return super().evaluate(model)

    def outputs(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, on all stages of a pipeline."""
        if model is not self.model or not self.pipeline:
            return super().outputs(model)
        tokens = self.batch_of(HELD_OUT_BATCH, 0)["input_ids"]
        logits: torch.Tensor = self.pipeline.outputs(tokens)
        return logits
