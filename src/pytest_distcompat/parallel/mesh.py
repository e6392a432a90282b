"""The sizes of a cell's mesh, as arguments of accelerate and transformers."""

from __future__ import annotations

from typing import Any

from pytest_distcompat.cell import Cell


def parallelism(cell: Cell) -> dict[str, int]:
    """Return the sizes of a mesh, as arguments of accelerate's ParallelismConfig.

    Empty for a mesh of one dimension.
    """
    replicas = int(cell.option("dp_replicate"))
    sizes = {}
    if replicas > 1:
        sizes["dp_replicate_size"] = replicas
    ranks_of_stage = cell.world_size // cell.pp
    sizes["dp_shard_size"] = ranks_of_stage // cell.tp // replicas
    if cell.tp > 1:
        sizes["tp_size"] = cell.tp
    if len(sizes) == 1:
        return {}
    return sizes


def distributed_config(cell: Cell) -> Any:
    """Return how transformers shards a model while it loads it.

    By layer, by expert, and what is left of both by FSDP2.
    """
    # https://huggingface.co/docs/transformers/expert_parallelism
    from transformers.distributed import DistributedConfig

    replicas = int(cell.option("dp_replicate"))
    return DistributedConfig(
        tp_size=cell.tp,
        ep_size=cell.ep,
        fsdp_size=cell.dp_size // replicas,
        dp_replicate_size=replicas,
    )
