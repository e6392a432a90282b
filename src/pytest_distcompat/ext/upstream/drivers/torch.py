"""Driver for plain torch: DDP, FSDP1 and FSDP2 by their own API.

Checkpoints are written and read by torch.distributed.checkpoint:
https://pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pytest_distcompat.ext.upstream.drivers import _average, _options, _preload, _rows
from pytest_distcompat.ext.upstream.drivers._torch_calls import TorchCalls
from pytest_distcompat.ext.upstream.drivers.tiny import HELD_OUT_BATCH, TinyDriver, listed
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


_DCP = "torch.distributed.checkpoint"


class TorchDriver(TinyDriver):
    """Training loop as in torch's tutorials."""

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
    # The llama has too few heads.
    needs_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **TinyDriver.needs_options,
        "tp_4": {"model": "mlp"},
    }
    reshards: ClassVar[tuple[str, ...]] = ("ddp", "fsdp1", "fsdp2")
    portable: ClassVar[Mapping[str, str]] = {
        "ddp": "fsdp2",
        "fsdp1": "fsdp2",
        "fsdp2": "ddp",
    }
    order: ClassVar[int] = 0
    live_calls: ClassVar[type[Calls]] = TorchCalls
    loaders: ClassVar[Mapping[str, Loader]] = _rows.TORCH

    #: What writes a checkpoint while training goes on; it is waited for after the next step.
    saving: Any = None
    #: The process group for it: on the group of the training, its collectives would pair with those
    #: of steps.
    saving_group: Any = None
    #: The model inside torch.compile's wrapper, with the methods of its strategy.
    wrapped: Any = None
    #: The ranks that hold the parts of each sequence; None without context parallelism.
    context: Any = None
    #: This rank's stage; None without pipeline parallelism.
    pipeline: Any = None
    #: Whether a checkpoint has the optimizer's state by the name of each parameter alone, so that
    #: each stage has its own.
    flat: bool = False
    #: The average of the weights; None without one.
    averaged_model: Any = None

    @classmethod
    def extra_state_in(cls, cell: Cell) -> Mapping[str, ExtraState]:
        """Return what every cell has, and the average of the weights in a cell that has one."""
        if not cell.option("ema"):
            return cls.extra_state
        return {**cls.extra_state, "averaged_model": ExtraState()}

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts."""
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
        """Create process group, wrapper and optimizer, in the order of torch's documentation."""
        import torch
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        device = torch.device(self.world.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not distributed.is_initialized():
            distributed.init_process_group(self.world.backend)
        if self.cell.option("async_save"):
            self.saving_group = distributed.new_group(backend="gloo")
        if self.cell.cp > 1:
            sizes = (self.cell.dp_size, self.cell.cp, self.cell.tp)
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "cp", "tp"))
            self.context = mesh["cp"]
        self.raw = model
        if self.cell.option("ema"):
            # Before it is wrapped: FSDP2 refuses to copy a model.
            self.averaged_model = _average.averaged(model)
        if self.cell.pp > 1:
            self._build_stages(model, device)
        else:
            self.model = self._wrap(model, device)
        if self.averaged_model is not None:
            self._place_average(device)
        self.optimizer = self.make_optimizer(self.model)
        self.scheduler = self.make_scheduler(self.optimizer)
        self.scaler = self._scaler(device.type) if self.precision.scaled else None
        self.seed_rank()

    def _place_average(self, device: torch.device) -> None:
        """Shard the average as the model is, or move it to the device."""
        if self.strategy.wrapper == "FSDP2":
            self.averaged_model.module = self._wrap(self.averaged_model.module, device)
        self.averaged_model.to(device)

    def _build_stages(self, model: Module, device: torch.device) -> None:
        """Keep this rank's stages of the model, wrap each and connect them to the others."""
        assert self.tiny.stages is not None
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
        # DDP does not survive that torch finds out shapes by a backward pass (docs/upstream.md).
        row = None
        if self.strategy.wrapper == "DDP":
            row = _rows_of([self.batch_of(0, 0)])[0]
        self.pipeline.connect(modules, row)

    def _wrap(self, model: Module, device: torch.device) -> Module:
        """Return the model as the strategy and the cell's options wrap it."""
        assert self.strategy.torch is not None
        mode = self.cell.option("compile")
        by_block = mode in {"regional", "partial"}
        if self.precision.float8:
            model = _options.in_8_bits(model, device.type)

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
        """Take the step on the rows of all micro-batches, one by one through the pipeline."""
        import torch

        batches = [batch for batch, _ in self.batches(number)]
        self.fed = _rows_of(batches)
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
            self.averaged_model.update_parameters(self.model)
        if self.saving:
            self.saving.result()
            self.saving = None

    def _clip(self) -> float:
        """Clip gradients, and return their norm over all ranks before that."""
        from torch.nn.utils import clip_grad_norm_

        if self.strategy.wrapper == "FSDP1":
            return float(self.wrapped.clip_grad_norm_(MAX_NORM))
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

    def _options(self) -> Any:
        """Return the ``StateDictOptions`` of a checkpoint."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        # No cpu_offload: on CPU ranks FSDP1's crashes
        # (https://github.com/pytorch/pytorch/issues/188989).
        settings = {
            "full_state_dict": self.cell.option("state_dict") == "full",
            "flatten_optimizer_state_dict": self.flat,
        }
        return StateDictOptions(**self.cell.with_settings("StateDictOptions", settings))

    def _state(self) -> dict[str, Any]:
        """Return the state that a checkpoint has; into it one is loaded in place."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if self.cell.option("save_only_model"):
            return {"model": get_model_state_dict(self.model, options=self._options())}
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._options())
        state = {"model": model, "optimizer": optimizer, "ranks": self.world.size}
        state["scheduler"] = [scheduler.state_dict() for scheduler in listed(self.scheduler)]
        if self.scaler:
            state["scaler"] = self.scaler.state_dict()
        if self.averaged_model is not None:
            state["averaged_model"] = get_model_state_dict(
                self.averaged_model, options=self._options()
            )
        return state

    @property
    def whole(self) -> bool:
        """Tell whether a checkpoint is one file."""
        return self.cell.option("state_dict") == "full" or self.world.own_disks

    def save(self, directory: Path) -> None:
        """Write one DCP checkpoint, or one file by rank 0.

        Where each node has a disk of its own, the first rank there writes that file.
        """
        import torch
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        state = self._state()
        if not self.cell.option("save_only_model"):
            self.save_random(directory)
        if self.whole:
            if self.world.writes_first:
                torch.save(state, directory / "checkpoint.pt")
            return
        if self.cell.option("async_save"):
            self.saving = async_save(
                state, checkpoint_id=directory, process_group=self.saving_group
            )
        else:
            save(state, storage_writer=self._writer(directory), planner=self._save_planner())

    def _writer(self, directory: Path) -> Any:
        """Return the writer of a DCP checkpoint."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(directory, **self.cell.settings("FileSystemWriter"))

    def _save_planner(self) -> Any:
        """Return the planner that DCP saves with."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        return DefaultSavePlanner(**self.cell.settings("DefaultSavePlanner"))

    def _load_planner(self) -> Any:
        """Return the planner that DCP loads with."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        return DefaultLoadPlanner(**self.cell.settings("DefaultLoadPlanner"))

    def load(self, directory: Path) -> None:
        """Load the state, in place by DCP, then set it by ``set_state_dict``."""
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
            set_state_dict,
        )

        if self.whole:
            state = self._read_whole(directory)
        else:
            state = self._read_shards(directory)
        options = self._options()
        if self.cell.option("save_only_model"):
            set_model_state_dict(self.model, state["model"], options=options)
            return
        if options.broadcast_from_rank0:
            # Not by one call: set_state_dict hangs where other ranks have nothing
            # (docs/upstream.md).
            set_model_state_dict(self.model, state["model"], options=options)
            set_optimizer_state_dict(
                self.model, self.optimizer, state["optimizer"], options=options
            )
        else:
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
        saved_states = state["scheduler"]
        for scheduler, saved in zip(listed(self.scheduler), saved_states, strict=True):
            scheduler.load_state_dict(saved)
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
        if self.averaged_model is not None:
            set_model_state_dict(
                self.averaged_model, state["averaged_model"], options=self._options()
            )
        self.load_random(directory, required=state["ranks"] == self.world.size)

    def _read_whole(self, directory: Path) -> dict[str, Any]:
        """Return the state of a checkpoint of one file."""
        import torch

        state: dict[str, Any] = torch.load(
            directory / "checkpoint.pt", map_location="cpu", weights_only=True
        )
        if self._options().broadcast_from_rank0 and self.world.rank:
            # The others get it from rank 0.
            state |= {"model": {}, "optimizer": {}}
        return state

    def _read_shards(self, directory: Path) -> dict[str, Any]:
        """Return the state of a DCP checkpoint, of which this rank has its shards."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        keys = FileSystemReader(directory).read_metadata().state_dict_metadata
        # By parameter names the optimizer's state has no param groups.
        by_groups = {"optimizer.param_groups", "optimizer.param_groups.0.params"} & keys.keys()
        if not by_groups:
            # It saves in the form of what it loaded, so that stages can load it again.
            self.flat = True
        state = self._state()
        load(state, checkpoint_id=directory, planner=self._load_planner())
        return state

    def rows(
        self,
        loader: str,
        count: int,
        start: tuple[int, int],
        directory: Path,  # noqa: ARG002 - nothing is saved
    ) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the rows that torch's loader gives."""
        rank = self.cell.dp_rank(self.world.rank)
        return _rows.torch_rows(loader, count, start, rank, self.cell.dp_size)

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, in evaluation mode.

        Gradients are zeroed before: recompiled for evaluation, FSDP1 fails on a step's sharded
        ones.
        """
        for optimizer in listed(self.optimizer):
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

    def export(self, directory: Path) -> None:
        """Write the full state dict on rank 0, in the format that the model's own library loads."""
        state = _options.whole_state(self.model)
        if self.pipeline:
            state = self.pipeline.gathered(state)
        if self.world.rank == 0:
            _options.write_whole(self.raw, state, directory)


def _rows_of(batches: Sequence[Batch]) -> list[Batch]:
    """Return the rows of some batches, each as a batch of its own."""
    rows: list[Batch] = []
    for batch in batches:
        for number in range(len(batch["labels"])):
            row: Batch = {}
            for name, values in batch.items():
                row[name] = values[number : number + 1]
            rows.append(row)
    return rows
