"""Defects of hybrid sharding: copies of shards that are not there, that part, or that only one of gets back what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .declare import CLIPPING, GRADIENTS, MEMORY, PARITY, Torch, twin

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.precisions import Precision

HYBRID = ("fsdp2-fp32-w4-model_mlp-dp_replicate_2", "fsdp1-fp32-w4-model_mlp-dp_replicate_2")


@twin("active", *HYBRID, match=r"^shards are in 1 copies \(all ranks\); expected 2$", also=MEMORY)
class SharesWithAll(Torch):
    """The copies are asked for and forgotten: shards over all ranks, across machines, where links are slow."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        return super().wrap(model, precision, cell.without("dp_replicate"), device)


@twin(
    "active",
    *HYBRID,
    match=r"^rank 2: \d+ parameters differ from rank 0's after three steps, first '\S+'; replicas must stay equal\nrank 3: ",
    also={**PARITY, **CLIPPING, **GRADIENTS},
)
class CopiesOnTheirOwn(Torch):
    """Each group of ranks shards, and nobody reduces from group to group: two trainings, each on half of the data."""

    def wrap(self, model: Module, precision: Precision, cell: Cell, device: torch.device) -> Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp_replicate", "shard"))["shard"]
        blocks = self.wrap_spec.block_modules(model)
        if cell.strategy == "fsdp1":
            return FullyShardedDataParallel(
                model,
                device_mesh=mesh,
                device_id=device,
                use_orig_params=True,
                auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),
            )
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


@twin(
    "reshard",
    HYBRID[0],
    match=r"^exp_avg '\S+' and \d+ others: unlike from rank to rank after the load at 8 ranks",
    also={"resume": r"^rank 2: (?s:.*)exp_avg"},
)
class OneCopyLoads(Torch):
    """The second copy keeps the moments of a fresh optimizer."""

    def load(self, directory: Path) -> None:
        super().load(directory)
        if self.world.rank >= self.world.size // 2:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
