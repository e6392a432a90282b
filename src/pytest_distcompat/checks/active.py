"""Does the strategy of the cell really run?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    check,
    every_rank,
    gradient_reductions,
    requested,
    with_rank,
)
from pytest_distcompat.cost import trained_elements
from pytest_distcompat.model_values import (
    Names,
    by_stage,
    expert_parts,
    held_states,
    is_sharded_along,
    stages_of,
    tp_copies,
    unused,
)
from pytest_distcompat.scenario import STEPS, TRAIN
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    CollectiveInfo,
    ModelInfo,
    ParameterInfo,
    RunTrace,
    Snapshot,
    Trace,
    UnwrappedInfo,
    shard_groups,
)
from pytest_distcompat.wording import named_ranks

#: The least part of the trainable elements that gradients are; even compressed ones are more,
#: metrics and norms are less.
MIN_REDUCED_FRACTION = 0.1


@check(scenario=TRAIN, until=(("train", "step", 2),), order=0)
def active(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the strategy really runs.

    Wrapper, kind of parameters, ZeRO stage, world size, shards and tensor-parallel parts are the strategy's. Gradients
    are reduced. Sequence parallelism cuts what lies between layers; under context parallelism attention sees all parts
    of a sequence; a secondary partition of ZeRO++ is there. Replicas of parameters, optimizer state and gradients
    stay equal, also after the last step. On one rank DDP may be left out, and FSDP1 does not shard.

    If it fails: the stack silently ran something else, as accelerate runs DDP instead of FSDP on the CPU.
    """
    run = trace.run()
    built = run.at("build")
    yield from every_rank(built, cell.world_size, "build")
    for snapshot in built:
        yield from with_rank(snapshot, _after_build(cell, run, snapshot))
    for stage_snapshots, stage_model in by_stage(run, built):
        # A stage without any parameter is a finding of ``_pipelined`` already.
        if stage_model is run.unwrapped or any(snapshot.parameters for snapshot in stage_snapshots):
            yield from _shards(cell, run, stage_snapshots, stage_model)
    trained = run.trained
    yield from every_rank(trained, cell.world_size, "three steps")
    if cell.world_size > cell.tp * cell.pp:
        for stage_snapshots, stage_model in by_stage(run, trained):
            yield from _reductions(cell, run, stage_snapshots, stage_model)
    for snapshot in trained:
        yield from with_rank(snapshot, _after_steps(cell, snapshot))
    differing_replicas = list(_differing_replicas(run, trained, "three steps"))
    if not differing_replicas:
        # Also after all steps: a rank may skip one, or leave DDP, at any time.
        differing_replicas = list(
            _differing_replicas(run, run.at("step", STEPS - 1), f"{STEPS} steps")
        )
    yield from differing_replicas


def _after_build(cell: Cell, run: RunTrace, snapshot: Snapshot) -> Iterator[str]:
    """Yield what a rank's model is not, right after it was built."""
    model = snapshot.model
    if model is None:
        yield "no model after build; the driver must set self.model"
        return
    if not cell.only_tp or model.wrappers:
        yield from _wrapping(cell, run, model)
    if model.world_size != cell.world_size:
        yield f"the process group has {model.world_size} ranks; expected {cell.world_size}"
    if model.trainer_world_size not in {None, cell.world_size}:
        yield f"the trainer believes in {model.trainer_world_size} ranks; expected {cell.world_size}"
    yield from _model_parallel(cell, run.unwrapped, snapshot)
    yield from _blocks_of_whole_layers(cell, run, snapshot)
    yield from _pipelined(cell, run.unwrapped, model)


def _after_steps(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield what a rank did not do in its steps."""
    yield from _sequence_parallel(cell, snapshot)
    yield from _context_parallel(cell, snapshot)
    yield from _secondary_partition(cell, snapshot)


def _ignored_predicate(cell: Cell, run: RunTrace) -> Callable[[str], bool]:
    """Return a predicate: True for live parameters of modules left out of the sharding, which ``units`` checks."""
    strategy = STRATEGIES.get(cell.strategy)
    unwrapped = run.unwrapped or UnwrappedInfo(())
    names = {info.name for info in unwrapped.parameters}
    prefixes = tuple(f"{module}." for module in unwrapped.ignored_modules)

    def is_ignored(live: str) -> bool:
        if not prefixes:
            return False
        return strategy.canonical(live, cell, names).startswith(prefixes)

    return is_ignored


def _wrapping(cell: Cell, run: RunTrace, model: ModelInfo) -> Iterator[str]:
    """Yield a finding each for another wrapper, ZeRO stage or kind of parameters than the strategy's."""
    strategy = STRATEGIES.get(cell.strategy)
    alone = cell.world_size == 1
    # torch.compile's wrapper is no strategy. A DeepSpeed engine holds no wrapper of torch.
    other_wrappers = set(model.wrappers) - {strategy.wrapper, "OptimizedModule"}
    if strategy.wrapper in model.wrappers:
        if other_wrappers:
            yield f"also wrapped by {', '.join(sorted(other_wrappers))}; expected {strategy.wrapper} alone"
    elif other_wrappers or not (alone and strategy.bare_alone):
        wrappers = [f"{wrapper} x {count}" for wrapper, count in model.wrappers.items()]
        running = ", ".join(wrappers) or "a bare model"
        yield f"{model.type} runs as {running}; expected {strategy.wrapper} for {strategy.name}"
    if model.zero_stage != strategy.zero_stage:
        yield f"ZeRO stage {model.zero_stage} is running; expected {strategy.zero_stage}"
    kinds = {strategy.kind, "FlatParameter"}
    if alone and strategy.kind_alone:
        kinds.add(strategy.kind_alone)
    is_ignored = _ignored_predicate(cell, run)
    others: list[ParameterInfo] = []
    for info in model.parameters:
        if info.kind in kinds or is_ignored(info.name):
            continue
        others.append(info)
    of_another_kind = (
        f"{len(others)} of {len(model.parameters)} parameters are not of kind {strategy.kind}"
    )
    if others:
        yield f"{of_another_kind}, {others[0].name!r} is a {others[0].kind}"
    elif not model.parameters and not model.pp_ranks:
        yield f"{of_another_kind}, there is none"


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


def _model_parallel(
    cell: Cell, unwrapped: UnwrappedInfo | None, snapshot: Snapshot
) -> Iterator[str]:
    """Yield findings unless layers are cut along ``tp``, and experts along ``ep``, in as many parts as were asked for."""
    for model_dim in _MODEL_DIMS:
        if not requested(cell, unwrapped, model_dim.name):
            continue
        expected = int(cell.option(model_dim.name))
        sizes = _sizes_along(model_dim.name, snapshot)
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
    """Return in how many parts parameters are cut along the mesh dimension of that name."""
    sizes: set[int] = set()
    for info in snapshot.parameters:
        dim = info.layout.dim(name)
        if dim and is_sharded_along(info, name):
            sizes.add(dim.size)
    return sizes


def _blocks_of_whole_layers(cell: Cell, run: RunTrace, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if some layers are sharded by tensor parallelism, and none of a block: a plan's names may not fit it."""
    if cell.tp == 1 or run.unwrapped is None:
        return
    if not _sizes_along("tp", snapshot):
        return  # ``_model_parallel`` reports that nothing is sharded
    names = Names(run, run.unwrapped)
    whole_weights: list[str] = []
    sharded_weights: list[str] = []
    for info in snapshot.parameters:
        if len(info.shape) < 2:
            continue
        # Experts that are spread need not be sharded.
        if is_sharded_along(info, "tp") or is_sharded_along(info, "ep"):
            sharded_weights.append(names(info.name))
        else:
            whole_weights.append(names(info.name))
    whole_blocks: list[str] = []
    for block in run.unwrapped.blocks:
        if _has_any_of(block, whole_weights) and not _has_any_of(block, sharded_weights):
            whole_blocks.append(block)
    if not whole_blocks:
        return
    blocks = ", ".join(repr(block) for block in whole_blocks[:2])
    if len(whole_blocks) > 2:
        blocks += f" and {len(whole_blocks) - 2} others"
    yield f"of the blocks {blocks} no layer is cut; expected {cell.tp} parts of tensor parallelism in each block"


def _has_any_of(module: str, parameters: Iterable[str]) -> bool:
    """Tell whether the module has any of the parameters, of its own or below."""
    return any(name.startswith(f"{module}.") for name in parameters)


def _pipelined(cell: Cell, unwrapped: UnwrappedInfo | None, model: ModelInfo) -> Iterator[str]:
    """Yield a finding unless the model was cut into stages for as many ranks as were asked for."""
    if not requested(cell, unwrapped, "pp"):
        return
    expected = (
        f"expected the layers of some of the stages on each of {cell.pp} ranks (pp {cell.pp})"
    )
    # A whole model names no ranks.
    pp_size = max(1, len(model.pp_ranks))
    if pp_size != cell.pp:
        ranks = "rank" if pp_size == 1 else "ranks"
        yield f"the model is on {pp_size} {ranks} of a pipeline; {expected}"
        return
    if cell.pp == 1 or unwrapped is None:
        return
    if not model.parameters:
        yield f"the model has no parameters; {expected}"
    elif len(model.parameters) >= len(unwrapped.parameters):
        yield f"the model has all {len(model.parameters)} parameters; {expected}"


def _sequence_parallel(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless the sums of the parts of a layer were scattered, as sequence parallelism does."""
    if not cell.option("sp"):
        return
    # An all-gather proves nothing: the logits of a cut vocabulary are gathered too.
    peers = cell.tp_peers(snapshot.rank)
    ops = {info.op for info in _collectives_of_floats(snapshot, set(peers))}
    if any(op.startswith("reduce_scatter") for op in ops):
        return
    collectives = f"(collectives of activations: {', '.join(sorted(ops)) or 'none'})"
    expected = "expected sequence parallelism to cut what lies between layers along the sequence"
    yield f"no sum of {named_ranks(peers, 0)} was scattered in a step {collectives}; {expected}"


def _context_parallel(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless the ranks of a sequence exchanged something among themselves."""
    # Where the same ranks share one sequence and all shards, that of parameters proves nothing;
    # there ``parity`` is left.
    peers = set(cell.cp_peers(snapshot.rank))
    if cell.cp == 1 or _collectives_of_floats(snapshot, peers):
        return
    expected = f"context parallelism (cp {cell.cp}): attention to the keys and values of the other parts of the sequence"
    yield f"{named_ranks(sorted(peers), 0)} exchanged nothing among themselves in a step; expected {expected}"


def _collectives_of_floats(snapshot: Snapshot, ranks: set[int]) -> list[CollectiveInfo]:
    """Return the collectives of these ranks, and no others, that carried floating-point numbers."""
    collectives: list[CollectiveInfo] = []
    for info in snapshot.collectives:
        if "float" not in info.dtype:
            continue
        if set(info.ranks) == ranks:
            collectives.append(info)
    return collectives


def _secondary_partition(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless ZeRO++ had cut all weights a second time (hpZ), among as many ranks as it was asked to."""
    config = cell.settings("ds_config")
    # DeepSpeed takes all ranks where there are fewer: the size of a node, on the two ranks of a
    # test.
    expected = min(int(config.get("zero_optimization.zero_hpz_partition_size", 1)), cell.world_size)
    if expected == 1 or not STRATEGIES.get(cell.strategy).shards:
        return
    sizes = {step.secondary for step in snapshot.steps}
    if sizes == {expected}:
        return
    partitions = " and ".join(str(size) for size in sorted(sizes - {0}))
    actual = f"among {partitions} ranks" if partitions else "nowhere"
    yield (
        f"the secondary partition of weights is {actual}; "
        f"expected one among {expected} (zero_hpz_partition_size), when the optimizer steps"
    )


@dataclass(frozen=True)
class _Holder:
    """A rank's snapshot, standing for those of some ranks that hold as much; usually for that rank alone."""

    snapshot: Snapshot
    ranks: frozenset[int]


@dataclass(frozen=True)
class _StoredModel:
    """The parameters that the ranks of one stage should store: of the whole model, without a pipeline.

    Attributes:
        cell: The cell.
        full_numel_by_name: The number of elements of each parameter, by unwrapped name.
        is_ignored: Tells of a live or an unwrapped name whether the parameter is left out of the
            sharding.
    """

    cell: Cell
    full_numel_by_name: Mapping[str, int]
    is_ignored: Callable[[str], bool]

    @property
    def numel(self) -> int:
        """Return the number of elements that are sharded or replicated."""
        total = 0
        for name, numel in self.full_numel_by_name.items():
            if not self.is_ignored(name):
                total += numel
        return total

    def copies(self, holders: Iterable[_Holder]) -> float:
        """Return how many copies of all these parameters the holders store together."""
        stored: list[float] = []
        for holder in holders:
            rank = holder.snapshot.rank
            for info in holder.snapshot.parameters:
                if self.is_ignored(info.name):
                    continue
                elements = _stored_elements(info, self.cell, rank)
                stored.append(elements * len(holder.ranks))
        return sum(stored) / self.numel


def _shards(
    cell: Cell, run: RunTrace, built: tuple[Snapshot, ...], unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield findings unless the ranks of a stage store each parameter once together if sharded, once each if replicated."""
    full_numel_by_name: dict[str, int] = {}
    if unwrapped is not None:
        full_numel_by_name = {info.name: math.prod(info.shape) for info in unwrapped.parameters}
    model = _StoredModel(cell, full_numel_by_name, _ignored_predicate(cell, run))
    if not model.numel:
        yield "the unwrapped model has no parameters, or was not recorded"
    elif not STRATEGIES.get(cell.strategy).shards:
        yield from _replicated(model, built)
    else:
        yield from _sharded(model, run, built, unwrapped)


def _replicated(model: _StoredModel, built: tuple[Snapshot, ...]) -> Iterator[str]:
    """Yield a finding unless each rank stores all parameters, or its tensor-parallel part of them."""
    cell = model.cell
    expected = cell.world_size // cell.pp // cell.tp
    copies = model.copies(_Holder(snapshot, frozenset(snapshot.ranks)) for snapshot in built)
    if abs(copies - expected) <= 0.01:
        return
    where = "all ranks"
    if cell.pp > 1:
        where = named_ranks([snapshot.rank for snapshot in built], cell.world_size)
    place = f"{cell.tp} ranks of tensor parallelism" if cell.tp > 1 else "rank"
    yield f"{where} together store {copies:.2f} copies of the parameters; expected {expected}, one a {place}"


def _sharded(
    model: _StoredModel, run: RunTrace, built: tuple[Snapshot, ...], unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield findings unless the ranks of each shard group store the parameters once together."""
    cell = model.cell
    size = cell.world_size // cell.pp
    groups = _shard_groups(model, built)
    replicas = len(groups)
    if not run.has_every_rank:
        # Only the groups of some ranks are known.
        replicas = size // len(groups[0])
    unsharded = replicas == size > 1
    expected = cell.option("dp_replicate")
    if unsharded or (requested(cell, unwrapped, "dp_replicate") and replicas != expected):
        ranks_of_groups = [named_ranks(ranks, cell.world_size) for ranks in groups]
        of_several = ", of several ranks" if unsharded else ""
        yield f"shards are in {replicas} copies ({'; '.join(ranks_of_groups)}); expected {expected}{of_several}"
    if size == 1:
        return
    for ranks in groups:
        for text in _shard_group(model, ranks, built):
            yield f"{named_ranks(ranks, cell.world_size)} together store {text}"


def _shard_groups(model: _StoredModel, built: tuple[Snapshot, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each copy of the model: those that hold any of its parameters together."""
    holders: dict[int, set[int]] = defaultdict(set)
    for snapshot in built:
        for info in snapshot.parameters:
            if not model.is_ignored(info.name):
                holders[snapshot.rank].update(info.layout.holders)
                holders[snapshot.rank].add(snapshot.rank)
    sorted_holders = {rank: tuple(sorted(ranks)) for rank, ranks in holders.items()}
    return shard_groups(sorted_holders, model.cell.world_size)


def _shard_group(
    model: _StoredModel, ranks: tuple[int, ...], built: tuple[Snapshot, ...]
) -> Iterator[str]:
    """Yield what the ranks of a shard group store together, where that is not each parameter once."""
    holders: list[_Holder] = []
    for snapshot in built:
        group_ranks = frozenset(snapshot.ranks).intersection(ranks)
        if group_ranks:
            holders.append(_Holder(snapshot, group_ranks))
    copies = model.copies(holders)
    # More than one copy may be padding: ZeRO-3 pads every shard, which shows on tiny parameters.
    most = max(1.01, (1 + len(ranks)) / 2)
    if not 0.99 <= copies < most:
        yield f"{copies:.2f} copies of the parameters; expected 1, each rank its shard"
        return
    yield from _parameters_not_stored_once(model, holders)


def _parameters_not_stored_once(model: _StoredModel, holders: list[_Holder]) -> Iterator[str]:
    """Yield a text for each parameter that the ranks do not store once: a small one hardly shows in the sum."""
    # Flat parameters have no names to compare by. A parameter without a live counterpart is a
    # finding of the check ``names``.
    cell = model.cell
    strategy = STRATEGIES.get(cell.strategy)
    stored: dict[str, float] = defaultdict(float)
    flat: set[str] = set()
    ranks = 0
    for holder in holders:
        ranks += len(holder.ranks)
        for info in holder.snapshot.parameters:
            name = strategy.canonical(info.name, cell, model.full_numel_by_name)
            stored[name] += _stored_elements(info, cell, holder.snapshot.rank) * len(holder.ranks)
            if info.layout.flat:
                flat.add(name)
    for name, numel in model.full_numel_by_name.items():
        if name not in stored or model.is_ignored(name):
            continue
        most: float = numel
        if name in flat:
            # Only what is cut flat is padded.
            most = max(numel + ranks - 1, numel * (1 + ranks) / 2)
        if not numel <= stored[name] <= most:
            yield f"{stored[name]:g} elements of {name!r}, which has {numel}; expected each one once"


def _stored_elements(info: ParameterInfo, cell: Cell, rank: int) -> float:
    """Return the elements that the rank stores, divided by how many ranks of tensor parallelism store the same.

    An expert that is here instead of others counts for these too.
    """
    return info.local_numel * expert_parts(info) / tp_copies(info, cell, rank)


def _reductions(
    cell: Cell, run: RunTrace, trained: tuple[Snapshot, ...], unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield a finding for each rank of a stage that reduced no gradients, or too few to be those of the stage."""
    without_gradient = unused(run)
    trainable = trained_elements(unwrapped)
    if trained:
        for info in trained[0].parameters:
            if info.name in without_gradient:
                trainable -= math.prod(info.shape)
    for snapshot in trained:
        yield from with_rank(snapshot, _reduced(cell, snapshot, trainable // cell.tp))


def _reduced(cell: Cell, snapshot: Snapshot, trainable: int) -> Iterator[str]:
    """Yield a finding if a rank reduced much less in a step than the trainable elements that it has."""
    reductions = [info.calls * info.numel for info in gradient_reductions(cell, snapshot)]
    if not reductions:
        ops = sorted({info.op for info in snapshot.collectives})
        yield (
            f"no gradient was reduced in a step (collectives: {', '.join(ops) or 'none'}); ranks train on their own"
        )
        return
    reduced = sum(reductions)
    if reduced < MIN_REDUCED_FRACTION * trainable:
        elements = f"only {reduced} elements were reduced in a step, of {trainable} trainable ones"
        yield f"{elements}; that is no gradient, ranks train on their own"


@dataclass(frozen=True)
class _HeldTensor:
    """A tensor, or a part of one, as one rank holds it.

    Attributes:
        rank: The rank.
        name: The tensor's name.
        region: Which part of the tensor it is: equal regions of a name are replicas.
        value: What replicas must have equal: a digest, or a gradient's sum of squares.
    """

    rank: int
    name: str
    region: Hashable
    value: Hashable


@dataclass(frozen=True)
class _ReplicaDifference:
    """Names of the tensors that a rank holds with other values than ``peer``, the first rank with a replica."""

    rank: int
    peer: int
    names: Sequence[str]


def _differing_replicas(run: RunTrace, trained: tuple[Snapshot, ...], when: str) -> Iterator[str]:
    """Yield a finding for each rank that holds something else than the first one with the same part of the same tensor."""
    stages = stages_of(run)
    name_of: Callable[[str], str] = str
    if stages and run.unwrapped:
        # Tied parameters have different names on different stages.
        name_of = Names(run, run.unwrapped)
    for kind, tensors in (
        ("parameters", _held_parameters(trained, name_of)),
        ("tensors of the optimizer's state", _held_optimizer_states(trained, name_of)),
        ("gradients", _held_gradients(trained, name_of)),
    ):
        differences = _replica_differences(tensors)
        for difference in differences:
            of_stages = _named_stages(stages, difference)
            first = f"first {difference.names[0]!r}{of_stages}"
            tensors_of_kind = f"{len(difference.names)} {kind}"
            peer = f"rank {difference.peer}"
            yield (
                f"rank {difference.rank}: {tensors_of_kind} differ from {peer}'s after {when}, {first}; "
                "replicas must stay equal"
            )
        if differences:
            return  # what is made from them differs too


def _named_stages(stages: Mapping[int, int], difference: _ReplicaDifference) -> str:
    """Return, for a finding, that two stages of a pipeline have the tensors; an empty text if they are of one stage."""
    stage = stages.get(difference.rank)
    peer_stage = stages.get(difference.peer)
    if stage == peer_stage:
        return ""
    return f" (stages {peer_stage} and {stage} have them, and train them apart)"


def _replica_differences(tensors: Iterable[_HeldTensor]) -> list[_ReplicaDifference]:
    """Return which ranks hold other values than the first rank with the same part of the same tensor, by rank and peer."""
    first_replicas: dict[tuple[str, Hashable], _HeldTensor] = {}
    names_by_ranks: dict[tuple[int, int], list[str]] = defaultdict(list)
    for tensor in tensors:
        first = first_replicas.setdefault((tensor.name, tensor.region), tensor)
        if first.rank != tensor.rank and first.value != tensor.value:
            names_by_ranks[tensor.rank, first.rank].append(tensor.name)
    differences: list[_ReplicaDifference] = []
    for (rank, peer), names in sorted(names_by_ranks.items()):
        difference = _ReplicaDifference(rank, peer, names)
        differences.append(difference)
    return differences


def _held_parameters(
    trained: tuple[Snapshot, ...], name_of: Callable[[str], str]
) -> Iterator[_HeldTensor]:
    """Yield each rank's parameters."""
    for snapshot in trained:
        for info in snapshot.parameters:
            yield _HeldTensor(snapshot.rank, name_of(info.name), info.layout.region, info.digest)


def _held_optimizer_states(
    trained: tuple[Snapshot, ...], name_of: Callable[[str], str]
) -> Iterator[_HeldTensor]:
    """Yield each rank's tensors of optimizer state, and its parts of flat masters."""
    for snapshot in trained:
        for state in (*held_states(snapshot), *snapshot.masters):
            # Flat partitions have no names; ``masters`` are their parts.
            if state.owner.startswith("partition "):
                continue
            # A plain number may be of the rank's own loss, as LBFGS keeps it.
            if state.dtype == "float":
                continue
            name = f"{state.key} of {name_of(state.owner)}"
            yield _HeldTensor(snapshot.rank, name, state.layout.region, state.digest)


def _held_gradients(
    trained: tuple[Snapshot, ...], name_of: Callable[[str], str]
) -> Iterator[_HeldTensor]:
    """Yield each rank's gradients of each step since the last snapshot."""
    for snapshot in trained:
        for nth, step in enumerate(snapshot.steps):
            for info in step.gradients:
                region = (nth, info.layout.region)
                yield _HeldTensor(snapshot.rank, name_of(info.name), region, info.square)
