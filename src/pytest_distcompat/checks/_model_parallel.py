"""Parts of the check ``active``: is the model divided among ranks as the cell asks?

``checks.active`` calls these functions with what one rank recorded after the build, or after three
steps. Each yields a text for what is wrong, such as ``layers are whole on each rank; expected 2
parts of tensor parallelism, along a mesh dimension named 'tp'``. ``active`` puts the rank before
it.

A cell such as ``fsdp2-fp32-w4-tp_2`` has options for the parallelisms within a model:

- ``tp``, tensor parallelism: each of so many ranks holds a part of the weights of each layer;
- ``sp``, sequence parallelism: these ranks also cut activations between layers along the sequence;
- ``ep``, expert parallelism: each of so many ranks holds some of the experts of a layer;
- ``pp``, pipeline parallelism: each of so many ranks holds some of the layers, a stage;
- ``cp``, context parallelism: each of so many ranks has a part of each sequence.

torch arranges the ranks in a mesh, a grid with a dimension for each of them. A parameter's
``layout`` says how it is placed along each dimension: ``tp=Shard(0)`` or ``tp=Replicate``.

``unwrapped`` is the record of the model before anything wraps it, None if it was not recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import requested
from pytest_distcompat.model_values import Names, is_sharded_along
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import CollectiveInfo, ModelInfo, RunTrace, Snapshot, UnwrappedInfo
from pytest_distcompat.wording import named_ranks


@dataclass(frozen=True)
class _ModelDim:
    """A mesh dimension that spreads parts of the model over its ranks.

    Attributes:
        name: Its name in a cell's options and in a mesh.
        parts: The parts of the model that it spreads.
        parallelism: What such a parallelism is called.
    """

    name: str
    parts: str
    parallelism: str


#: ``tp`` cuts the weights of each layer; ``ep`` gives each rank some of the experts of a layer.
_MODEL_DIMS = (_ModelDim("tp", "layers", "tensor"), _ModelDim("ep", "experts", "expert"))


def wrong_model_parallelism(
    cell: Cell, unwrapped: UnwrappedInfo | None, snapshot: Snapshot
) -> Iterator[str]:
    """Yield a text if layers or experts are not in as many parts as the cell asks for.

    Layers are sharded along the mesh dimension ``tp``, experts are spread along ``ep``.
    """
    for model_dim in _MODEL_DIMS:
        # ``requested`` is False at the default of 1 if the driver does not know the option: then
        # nothing requests whole layers of it.
        if not requested(cell, unwrapped, model_dim.name):
            continue
        expected = int(cell.option(model_dim.name))
        sizes = _sizes_along(model_dim.name, snapshot)
        # One part and no part are the same: all is whole.
        if sizes - {1} == {expected} - {1}:
            continue
        actual = "whole on each rank"
        if sizes:
            numbers = ", ".join(str(size) for size in sorted(sizes))
            actual = f"in {numbers} parts"
        mesh_dim = f"along a mesh dimension named {model_dim.name!r}"
        yield (
            f"{model_dim.parts} are {actual}; "
            f"expected {expected} parts of {model_dim.parallelism} parallelism, {mesh_dim}"
        )


def _sizes_along(name: str, snapshot: Snapshot) -> set[int]:
    """Return in how many parts the rank's parameters are cut along a mesh dimension.

    ``{2}`` if some are cut in two; empty if none is cut.
    """
    sizes: set[int] = set()
    for info in snapshot.parameters:
        dim = info.layout.dim(name)
        if dim and is_sharded_along(info, name):
            sizes.add(dim.size)
    return sizes


def blocks_of_whole_layers(cell: Cell, run: RunTrace, snapshot: Snapshot) -> Iterator[str]:
    """Yield a text if tensor parallelism shards layers of some blocks, but no layer of others.

    A plan names the layers to shard; its names may not fit all blocks of the model.
    """
    if cell.tp == 1 or run.unwrapped is None:
        return
    if not _sizes_along("tp", snapshot):
        return  # ``wrong_model_parallelism`` reports that nothing is sharded
    whole_blocks = _whole_blocks(run, run.unwrapped, snapshot)
    if not whole_blocks:
        return
    blocks = ", ".join(repr(block) for block in whole_blocks[:2])
    others = len(whole_blocks) - 2
    if others > 0:
        blocks += f" and {others} others"
    expected = f"expected {cell.tp} parts of tensor parallelism in each block"
    yield f"of the blocks {blocks} no layer is cut; {expected}"


def _whole_blocks(run: RunTrace, unwrapped: UnwrappedInfo, snapshot: Snapshot) -> list[str]:
    """Return the names of the blocks whose matrices are all whole on the rank.

    Blocks are the modules to be wrapped one by one, such as ``model.layers.0``.
    """
    names = Names(run, unwrapped)
    whole_weights: list[str] = []
    sharded_weights: list[str] = []
    for info in snapshot.parameters:
        # Norms and biases, which have one dimension, may stay whole.
        if len(info.shape) < 2:
            continue
        # Experts that are spread over ranks (``ep``) need not be cut too.
        if is_sharded_along(info, "tp") or is_sharded_along(info, "ep"):
            sharded_weights.append(names(info.name))
        else:
            whole_weights.append(names(info.name))
    whole_blocks: list[str] = []
    for block in unwrapped.blocks:
        if _has_any_of(block, whole_weights) and not _has_any_of(block, sharded_weights):
            whole_blocks.append(block)
    return whole_blocks


def _has_any_of(module: str, parameters: Iterable[str]) -> bool:
    """Tell whether any of these parameters is in the module, or in a module within it."""
    return any(name.startswith(f"{module}.") for name in parameters)


def wrong_pipeline(cell: Cell, unwrapped: UnwrappedInfo | None, model: ModelInfo) -> Iterator[str]:
    """Yield a text if the model is not on as many ranks of a pipeline as the cell asks for."""
    if not requested(cell, unwrapped, "pp"):
        return
    expected = (
        f"expected the layers of some of the stages on each of {cell.pp} ranks (pp {cell.pp})"
    )
    # ``pp_ranks`` are the ranks of one pipeline; a whole model has none.
    pp_size = max(1, len(model.pp_ranks))
    if pp_size != cell.pp:
        ranks = f"{pp_size} ranks"
        if pp_size == 1:
            ranks = "1 rank"
        yield f"the model is on {ranks} of a pipeline; {expected}"
        return
    if cell.pp == 1 or unwrapped is None:
        return
    # Each rank must have some parameters of the model, and not all of them.
    if not model.parameters:
        yield f"the model has no parameters; {expected}"
    elif len(model.parameters) >= len(unwrapped.parameters):
        yield f"the model has all {len(model.parameters)} parameters; {expected}"


def missing_sequence_parallelism(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a text if no collective of sequence parallelism ran in the step.

    Under tensor parallelism each rank computes a partial sum of a layer's output. Sequence
    parallelism sums them by a reduce-scatter, which leaves each rank a part of the sequence.
    """
    if not cell.option("sp"):
        return
    # An all-gather proves nothing: the logits of a cut vocabulary are gathered too.
    peers = cell.tp_peers(snapshot.rank)
    ops = {info.op for info in _collectives_of_floats(snapshot, set(peers))}
    if any(op.startswith("reduce_scatter") for op in ops):
        return
    # With 0 they are listed even if they are all ranks: ``ranks 0, 1``.
    ranks = named_ranks(peers, 0)
    listed_ops = ", ".join(sorted(ops)) or "none"
    yield (
        f"no sum of {ranks} was scattered in a step (collectives of activations: {listed_ops}); "
        "expected sequence parallelism to cut what lies between layers along the sequence"
    )


def missing_context_parallelism(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a text if the ranks that share a sequence exchanged nothing in the step.

    Attention needs the keys and values of the other parts of the sequence.
    """
    # If the same ranks also shard the parameters, they exchange those. Then this proves nothing,
    # and the check ``parity`` must notice.
    peers = set(cell.cp_peers(snapshot.rank))
    if cell.cp == 1 or _collectives_of_floats(snapshot, peers):
        return
    # With 0 they are listed even if they are all ranks.
    ranks = named_ranks(sorted(peers), 0)
    yield (
        f"{ranks} exchanged nothing among themselves in a step; "
        f"expected context parallelism (cp {cell.cp}): "
        "attention to the keys and values of the other parts of the sequence"
    )


def _collectives_of_floats(snapshot: Snapshot, ranks: set[int]) -> list[CollectiveInfo]:
    """Return the collectives of these ranks, and no others, that carried floating-point numbers."""
    collectives: list[CollectiveInfo] = []
    for info in snapshot.collectives:
        if "float" not in info.dtype:
            continue
        if set(info.ranks) == ranks:
            collectives.append(info)
    return collectives


def wrong_secondary_partition(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a text if ZeRO++ did not keep its secondary partition (hpZ) in each step.

    ZeRO-3 shards the weights over all ranks. With hpZ DeepSpeed also keeps a second copy, sharded
    over fewer ranks: ``zero_hpz_partition_size`` in its JSON configuration.
    """
    config = cell.settings("ds_config")
    # The configured number is often that of a node's GPUs. DeepSpeed takes all ranks if there are
    # fewer, such as the two ranks of a test.
    configured = int(config.get("zero_optimization.zero_hpz_partition_size", 1))
    expected = min(configured, cell.world_size)
    if expected == 1 or not STRATEGIES.get(cell.strategy).shards:
        return
    # Of each step over how many ranks the copy is sharded; 0 if there is none.
    sizes = {step.secondary for step in snapshot.steps}
    if sizes == {expected}:
        return
    numbers = [str(size) for size in sorted(sizes - {0})]
    actual = "nowhere"
    if numbers:
        actual = f"among {' and '.join(numbers)} ranks"
    yield (
        f"the secondary partition of weights is {actual}; "
        f"expected one among {expected} (zero_hpz_partition_size), when the optimizer steps"
    )
