"""Trainers in which the strategy that was asked for does not run, or runs in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pytest_distcompat.ext.upstream.drivers import _accelerator
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.strategies._base import MAX_NORM

from .declare import CLIPPING, GRADIENTS, MEMORY, PARITY, UNCUT, Accelerate, Torch, twin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision

#: What a check says of gradients that never met.
APART = r"gradients were reduced in nothing"
NO_ROOT = {"units": r"FSDP's units are 'blocks\.0', 'blocks\.1'; expected 'blocks\.0', 'blocks\.1', the root"}


_REPLICAS = r"DistributedDataParallel runs as DDP x 1; expected FSDP\d for fsdp\d"
_PREFIXED = r"'module\.(\S+)' maps to 'module\.\1', which is no"
_BARE = r"runs as a bare model; expected FSDP(?s:.*)the trainer believes in 1 ranks; expected 2"


@twin(
    "active",
    "fsdp1-fp32-w2-model_mlp",
    match=_REPLICAS,
    # Its export asks for what the plugin would have said.
    also={**MEMORY, **UNCUT, "names": _PREFIXED, "observers": "raised AttributeError"},
)
@twin("active", "fsdp2-fp32-w2-model_mlp", match=_REPLICAS, also={**MEMORY, **UNCUT, "names": _PREFIXED})
@twin(
    "active",
    "zero2-fp32-w2-model_mlp",
    "zero3-fp32-w2-model_mlp",
    match=r"runs as DDP x 1; expected DeepSpeedEngine for zero\d(?s:.*)ZeRO stage None is running",
    also={**MEMORY, "optimizer": r"0 of \d+ elements of trainable parameter 'module\.inlet\.weight'"},
)
class CpuFlag(Accelerate):
    """accelerate with a plugin and ``cpu=True``: plain DDP, without a word."""

    def build(self, model: Module) -> None:
        with mock.patch.object(_accelerator, "on_cpu", return_value={"cpu": True}):
            super().build(model)


@twin(
    "active",
    "fsdp1-fp32-w2-model_mlp",
    match=_BARE,
    also={**PARITY, **CLIPPING, **MEMORY, **UNCUT, "dtypes": APART, **GRADIENTS, "observers": "raised AttributeError"},
)
@twin(
    "active",
    "fsdp2-bf16_pure-w2-model_mlp",
    match=_BARE,
    also={**PARITY, **CLIPPING, **MEMORY, **UNCUT, "dtypes": APART, **GRADIENTS},
)
class NoCpuFlag(Accelerate):
    """accelerate with an FSDP plugin and nothing else: no wrapper, no gradient sync, each rank on its own."""

    def build(self, model: Module) -> None:
        with mock.patch.object(_accelerator, "on_cpu", return_value={}):
            super().build(model)

    def save(self, directory: Path) -> None:
        # Every rank takes itself for the main process, and two at a time would write each other's files.
        if self.world.rank == 0:
            super().save(directory)


@twin("active", "zero2-fp32-w2-model_mlp", match=r"ZeRO stage 1 is running; expected 2")
@twin("active", "zero3-bf16_upcast-w2-model_mlp", match=r"ZeRO stage 1 is running; expected 3(?s:.*)of kind ZeRO-3")
class LowerStage(Accelerate):
    """The stage of the DeepSpeed config is another one than the trainer was asked for."""

    stage = 1

    def settings(self, precision: Precision, cell: Cell) -> Mapping[str, Any]:
        from accelerate import DeepSpeedPlugin

        from pytest_distcompat.strategies.zero import config

        settings = dict(super().settings(precision, cell))
        settings["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config(self.stage, precision, cell))
        return settings


@twin(
    "active",
    "zero2-fp32-w2-model_mlp",
    match=r"ZeRO stage 0 is running; expected 2",
    also={**MEMORY, "optimizer": r"0 of \d+ elements of trainable parameter"},
)
class StageNought(LowerStage):
    """DeepSpeed without ZeRO, as fp8 once brought it about (accelerate #3360)."""

    stage = 0


@twin(
    "active",
    "fsdp2-fp32-w2-model_mlp",
    match=r"runs as FSDP1 x 3; expected FSDP2(?s:.*)not of kind DTensor",
    also={
        "names": r"'_fsdp_wrapped_module\.\S+\.bias' maps to",
        "units": r"FSDP's units are '_fsdp_wrapped_module\.blocks\.0',",
    },
)
class OlderFsdp(Torch):
    """FSDP2 is asked for, FSDP1 is built, as Trainer did when it left ``fsdp_config["version"]`` unread."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        wrap = STRATEGIES.get("fsdp1").torch
        assert wrap is not None
        return wrap(model, precision, cell, device, self.wrap_spec)

    def _clip(self) -> float:
        return float(self.wrapped.clip_grad_norm_(MAX_NORM))


@twin(
    "active",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^shards are in 2 copies \(rank 0; rank 1\); expected 1, of several ranks\n",
    also={**PARITY, **CLIPPING, **MEMORY, "dtypes": APART, **GRADIENTS},
)
class AloneInTheMesh(Torch):
    """fully_shard over a mesh of one rank: all the classes are right and nothing is sharded."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (cell.world_size, 1), mesh_dim_names=("others", "alone"))["alone"]
        for block in self.wrap_spec.block_modules(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


class Mixed(Torch):
    """DTensors and others, which torch refuses to clip, or to update by one operation, together: so nobody does."""

    fused = False

    def _clip(self) -> float:
        return float("nan")


@twin(
    "active",
    "fsdp2-fp32-w2-model_mlp",
    match=r"6 of 14 parameters are not of kind DTensor, 'inlet\.weight'",
    also={**PARITY, **CLIPPING, **MEMORY, **NO_ROOT, **GRADIENTS},
)
class RootForgotten(Mixed):
    """Only the blocks are sharded; what stands in the root is neither sharded nor reduced."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.fsdp import fully_shard

        for block in self.wrap_spec.block_modules(model):
            fully_shard(block)
        return model


@twin(
    "active",
    "fsdp1-fp32-w2-model_mlp",
    match=r"shards are in 2 copies \(rank 0; rank 1\); expected 1, of several ranks",
    also={**MEMORY, **UNCUT},
)
class NoShard(Torch):
    """FSDP1 with NO_SHARD: the wrapper of the one, the memory of the other."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        return FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=device, use_orig_params=True
        )


@twin(
    "active",
    "fsdp1-fp32-w2-model_mlp",
    match=r"all ranks together store 130 elements of 'outlet\.weight', which has 65",
    also={**PARITY, **CLIPPING, **UNCUT, **GRADIENTS},
)
class LayerLeftOut(Torch):
    """FSDP1 that ignores the last layer: a copy of it on each rank, and no reduction of its gradients."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(
            model, ignored_modules=[model.get_submodule("outlet")], device_id=device, use_orig_params=True
        )


@twin("active", "fsdp2-fp32-w2-model_mlp", match=r"rank 1: the trainer believes in 1 ranks; expected 2")
class BelievesInOneRank(Torch):
    """A trainer that shards over two ranks and divides its batch, or its learning rate, by one."""

    def trainer_world_size(self) -> int | None:
        return 1


@twin(
    "active",
    "fsdp2-fp32-w2-model_mlp",
    match=r"also wrapped by DDP; expected FSDP2 alone",
    also={**PARITY, **CLIPPING, **MEMORY, **NO_ROOT, "names": r"live parameter 'outlet\.module\.weight' maps to"},
)
class TwoWrappers(Mixed):
    """FSDP2 for the blocks, DDP for the last layer."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        for block in self.wrap_spec.block_modules(model):
            fully_shard(block)
        model.outlet = DistributedDataParallel(model.get_submodule("outlet"))
        return model


class SetsThreads(Torch):
    """A trainer that sets the number of threads on purpose: no check has a say in that."""

    keeps_settings: ClassVar[bool] = False

    def build(self, model: Module) -> None:
        import torch

        super().build(model)
        torch.set_num_threads(torch.get_num_threads() + 2)


@twin(
    "active",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: torch's setting 'threads' is \d+ after three steps; \d+ before the build",
    sound="twins.twins_active:SetsThreads",
)
class LeavesOtherThreads(SetsThreads):
    """The number of threads is not what the user set: https://github.com/huggingface/accelerate/pull/2755."""

    keeps_settings: ClassVar[bool] = True
