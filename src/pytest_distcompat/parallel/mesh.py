"""The sizes of a cell's device mesh, as arguments of accelerate and transformers.

A cell is one configuration under test: ``fsdp2-fp32-w8-dp_replicate_2-tp_2`` has 8 ranks on a mesh
of 2 replicas, of 2 shards each, of 2 parts of each layer. ``strategies/_fsdp.py`` calls
``parallelism`` for the arguments of accelerate and for torch's own mesh; the driver for Trainer
calls ``distributed_config`` for models that transformers shards while it loads them.
"""

from __future__ import annotations

from typing import Any

from pytest_distcompat.cell import Cell


def parallelism(cell: Cell) -> dict[str, int]:
    """Return the sizes of a mesh, as arguments of accelerate's ParallelismConfig.

    ``{"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}``, the outermost first. Empty for a
    mesh of one dimension. Ranks of other stages of a pipeline are on a mesh of their own.

    Ranks of context and of expert parallelism (``cp``, ``ep``) are among those of ``dp_shard``:
    they hold different shards of the parameters.
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
    """Return how transformers shards a model while it loads it, as its ``DistributedConfig``.

    It splits layers over ``tp`` ranks and spreads experts over ``ep`` ranks. FSDP2 shards the parts
    that then are on each rank.
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
