"""Does the strategy of the cell really run?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import (
    Snapshots,
    check,
    every_rank,
    gradient_reductions,
    requested,
    with_rank,
)
from pytest_distcompat.cost import trained_elements
from pytest_distcompat.model_values import (
    Names,
    Ranks,
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

#: The name of a tensor, and which part of it.
_Place = tuple[str, Hashable]
#: A rank, and the first one with the same part of a tensor.
_RankAndPeer = tuple[int, int]


@check(scenario=TRAIN, until=(("train", "step", 2),), order=0)
def active(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the strategy really runs.

    Wrapper, kind of parameters, ZeRO stage, world size, shards and tensor-parallel parts are the
    strategy's. Gradients are reduced. Sequence parallelism cuts what lies between layers; under
    context parallelism attention sees all parts of a sequence; a secondary partition of ZeRO++ is
    there. Replicas of parameters, optimizer state and gradients stay equal, also after the last
    step. On one rank DDP may be left out, and FSDP1 does not shard.

    If it fails: the stack silently ran something else, as accelerate runs DDP instead of FSDP on
    the CPU.
    """
    run = trace.run()
    built = run.at("build")
    yield from every_rank(built, cell.world_size, "build")
    for snapshot in built:
        yield from with_rank(snapshot, _after_build(cell, run, snapshot))
    for stage_snapshots, stage_model in by_stage(run, built):
        # A stage without any parameter is a finding of ``_pipelined`` already.
        if stage_model is run.unwrapped or _have_parameters(stage_snapshots):
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
        last = run.at("step", STEPS - 1)
        differing_replicas = list(_differing_replicas(run, last, f"{STEPS} steps"))
    yield from differing_replicas


def _have_parameters(snapshots: Iterable[Snapshot]) -> bool:
    """Tell whether any of the ranks has a parameter."""
    return any(snapshot.parameters for snapshot in snapshots)


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
    trainer_world_size = model.trainer_world_size
    if trainer_world_size not in {None, cell.world_size}:
        yield f"the trainer believes in {trainer_world_size} ranks; expected {cell.world_size}"
    yield from _model_parallel(cell, run.unwrapped, snapshot)
    yield from _blocks_of_whole_layers(cell, run, snapshot)
    yield from _pipelined(cell, run.unwrapped, model)


def _after_steps(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield what a rank did not do in its steps."""
    yield from _sequence_parallel(cell, snapshot)
    yield from _context_parallel(cell, snapshot)
    yield from _secondary_partition(cell, snapshot)


def _ignored_predicate(cell: Cell, run: RunTrace) -> Callable[[str], bool]:
    """Return a predicate that tells, by its live name, whether a parameter is not to be sharded.

    Such parameters are those of ignored modules, which the check ``units`` looks at.
    """
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
    """Yield findings for a wrapper, ZeRO stage or parameters that are not the strategy's."""
    strategy = STRATEGIES.get(cell.strategy)
    yield from _other_wrappers(cell, model)
    if model.zero_stage != strategy.zero_stage:
        yield f"ZeRO stage {model.zero_stage} is running; expected {strategy.zero_stage}"
    yield from _other_kinds(cell, run, model)


def _other_wrappers(cell: Cell, model: ModelInfo) -> Iterator[str]:
    """Yield a finding if the model is not in the strategy's wrapper, or in others too."""
    strategy = STRATEGIES.get(cell.strategy)
    may_be_bare = cell.world_size == 1 and strategy.bare_alone
    # torch.compile's wrapper is no strategy. A DeepSpeed engine holds no wrapper of torch.
    others = set(model.wrappers) - {strategy.wrapper, "OptimizedModule"}
    if strategy.wrapper in model.wrappers:
        if others:
            names = ", ".join(sorted(others))
            yield f"also wrapped by {names}; expected {strategy.wrapper} alone"
    elif others or not may_be_bare:
        wrappers: list[str] = []
        for wrapper, count in model.wrappers.items():
            wrappers.append(f"{wrapper} x {count}")
        running = ", ".join(wrappers) or "a bare model"
        expected = f"expected {strategy.wrapper} for {strategy.name}"
        yield f"{model.type} runs as {running}; {expected}"


def _other_kinds(cell: Cell, run: RunTrace, model: ModelInfo) -> Iterator[str]:
    """Yield a finding if parameters are of another kind, such as DTensor, than the strategy's."""
    strategy = STRATEGIES.get(cell.strategy)
    kinds = {strategy.kind, "FlatParameter"}
    if cell.world_size == 1 and strategy.kind_alone:
        kinds.add(strategy.kind_alone)
    is_ignored = _ignored_predicate(cell, run)
    others: list[ParameterInfo] = []
    for info in model.parameters:
        if info.kind in kinds or is_ignored(info.name):
            continue
        others.append(info)
    parameters = len(model.parameters)
    finding = f"{len(others)} of {parameters} parameters are not of kind {strategy.kind}"
    if others:
        first = others[0]
        yield f"{finding}, {first.name!r} is a {first.kind}"
    elif not parameters and not model.pp_ranks:
        yield f"{finding}, there is none"


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
    """Yield findings unless layers and experts are in as many parts as were asked for.

    Layers are sharded along the mesh dimension ``tp``, experts are spread along ``ep``.
    """
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
    """Yield a finding for blocks of which tensor parallelism shards no layer, but those of others.

    Names in the plan may not fit these blocks.
    """
    if cell.tp == 1 or run.unwrapped is None:
        return
    if not _sizes_along("tp", snapshot):
        return  # ``_model_parallel`` reports that nothing is sharded
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
    """Return the blocks whose weights are all whole on the rank."""
    names = Names(run, unwrapped)
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
    for block in unwrapped.blocks:
        if _has_any_of(block, whole_weights) and not _has_any_of(block, sharded_weights):
            whole_blocks.append(block)
    return whole_blocks


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
        ranks = f"{pp_size} ranks"
        if pp_size == 1:
            ranks = "1 rank"
        yield f"the model is on {ranks} of a pipeline; {expected}"
        return
    if cell.pp == 1 or unwrapped is None:
        return
    if not model.parameters:
        yield f"the model has no parameters; {expected}"
    elif len(model.parameters) >= len(unwrapped.parameters):
        yield f"the model has all {len(model.parameters)} parameters; {expected}"


def _sequence_parallel(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless sequence parallelism scattered the partial sums of layers."""
    if not cell.option("sp"):
        return
    # An all-gather proves nothing: the logits of a cut vocabulary are gathered too.
    peers = cell.tp_peers(snapshot.rank)
    ops = {info.op for info in _collectives_of_floats(snapshot, set(peers))}
    if any(op.startswith("reduce_scatter") for op in ops):
        return
    ranks = named_ranks(peers, 0)
    listed_ops = ", ".join(sorted(ops)) or "none"
    yield (
        f"no sum of {ranks} was scattered in a step (collectives of activations: {listed_ops}); "
        "expected sequence parallelism to cut what lies between layers along the sequence"
    )


def _context_parallel(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless the ranks of a sequence exchanged something among themselves."""
    # Where the same ranks share one sequence and all shards, that of parameters proves nothing;
    # there ``parity`` is left.
    peers = set(cell.cp_peers(snapshot.rank))
    if cell.cp == 1 or _collectives_of_floats(snapshot, peers):
        return
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


def _secondary_partition(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless ZeRO++ had all weights in a second partition (hpZ) in each step.

    The configuration says among how many ranks it is.
    """
    config = cell.settings("ds_config")
    # DeepSpeed takes all ranks where there are fewer: the size of a node, on the two ranks of a
    # test.
    configured = int(config.get("zero_optimization.zero_hpz_partition_size", 1))
    expected = min(configured, cell.world_size)
    if expected == 1 or not STRATEGIES.get(cell.strategy).shards:
        return
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


@dataclass(frozen=True)
class _Holder:
    """A rank that stands for others that hold as much as it; usually for itself alone.

    Attributes:
        snapshot: The rank's snapshot.
        ranks: All ranks that it stands for.
    """

    snapshot: Snapshot
    ranks: frozenset[int]


@dataclass(frozen=True)
class _StoredModel:
    """The parameters that the ranks of one pipeline stage should store together.

    Without a pipeline they are those of the whole model.

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
    cell: Cell, run: RunTrace, built: Snapshots, unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield findings unless the ranks of a stage store each parameter as often as they should.

    That is once all together if parameters are sharded, once each if they are replicated.
    """
    full_numel_by_name: dict[str, int] = {}
    if unwrapped is not None:
        for info in unwrapped.parameters:
            full_numel_by_name[info.name] = math.prod(info.shape)
    model = _StoredModel(cell, full_numel_by_name, _ignored_predicate(cell, run))
    if not model.numel:
        yield "the unwrapped model has no parameters, or was not recorded"
    elif not STRATEGIES.get(cell.strategy).shards:
        yield from _replicated(model, built)
    else:
        yield from _sharded(model, run, built, unwrapped)


def _replicated(model: _StoredModel, built: Snapshots) -> Iterator[str]:
    """Yield a finding unless each rank stores all parameters, or its tensor-parallel part."""
    cell = model.cell
    expected = cell.world_size // cell.pp // cell.tp
    holders: list[_Holder] = []
    for snapshot in built:
        holders.append(_Holder(snapshot, frozenset(snapshot.ranks)))
    copies = model.copies(holders)
    if abs(copies - expected) <= 0.01:
        return
    where = "all ranks"
    if cell.pp > 1:
        ranks = [snapshot.rank for snapshot in built]
        where = named_ranks(ranks, cell.world_size)
    place = "rank"
    if cell.tp > 1:
        place = f"{cell.tp} ranks of tensor parallelism"
    stored = f"{where} together store {copies:.2f} copies of the parameters"
    yield f"{stored}; expected {expected}, one a {place}"


def _sharded(
    model: _StoredModel, run: RunTrace, built: Snapshots, unwrapped: UnwrappedInfo | None
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
        ranks_of_groups = "; ".join(named_ranks(ranks, cell.world_size) for ranks in groups)
        expectation = f"expected {expected}"
        if unsharded:
            expectation += ", of several ranks"
        yield f"shards are in {replicas} copies ({ranks_of_groups}); {expectation}"
    if size == 1:
        return
    for ranks in groups:
        where = named_ranks(ranks, cell.world_size)
        for text in _shard_group(model, ranks, built):
            yield f"{where} together store {text}"


def _shard_groups(model: _StoredModel, built: Snapshots) -> tuple[Ranks, ...]:
    """Return the ranks of each copy of the model: those that hold parameters of it together."""
    holders: dict[int, set[int]] = defaultdict(set)
    for snapshot in built:
        for info in snapshot.parameters:
            if not model.is_ignored(info.name):
                holders[snapshot.rank].update(info.layout.holders)
                holders[snapshot.rank].add(snapshot.rank)
    sorted_holders: dict[int, Ranks] = {}
    for rank, ranks in holders.items():
        sorted_holders[rank] = tuple(sorted(ranks))
    return shard_groups(sorted_holders, model.cell.world_size)


def _shard_group(model: _StoredModel, ranks: Ranks, built: Snapshots) -> Iterator[str]:
    """Yield what the ranks of a shard group store together, if not each parameter once."""
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
    """Yield a text for each parameter that the ranks do not store once together.

    A small one hardly shows in the sum of all.
    """
    # Flat parameters have no names to compare by. A parameter without a live counterpart is a
    # finding of the check ``names``.
    cell = model.cell
    strategy = STRATEGIES.get(cell.strategy)
    stored_by_name: dict[str, float] = defaultdict(float)
    flat: set[str] = set()
    ranks = 0
    for holder in holders:
        ranks += len(holder.ranks)
        for info in holder.snapshot.parameters:
            name = strategy.canonical(info.name, cell, model.full_numel_by_name)
            elements = _stored_elements(info, cell, holder.snapshot.rank)
            stored_by_name[name] += elements * len(holder.ranks)
            if info.layout.flat:
                flat.add(name)
    for name, numel in model.full_numel_by_name.items():
        if name not in stored_by_name or model.is_ignored(name):
            continue
        stored = stored_by_name[name]
        most: float = numel
        if name in flat:
            # Only what is cut flat is padded.
            padded_once = numel + ranks - 1
            most = max(padded_once, numel * (1 + ranks) / 2)
        if not numel <= stored <= most:
            yield f"{stored:g} elements of {name!r}, which has {numel}; expected each one once"


def _stored_elements(info: ParameterInfo, cell: Cell, rank: int) -> float:
    """Return how many elements of a parameter a rank counts for in the sum over all ranks.

    What several ranks of tensor parallelism store alike counts once in the sum. An expert that is
    here instead of others counts for these too.
    """
    elements = info.local_numel * expert_parts(info)
    return elements / tp_copies(info, cell, rank)


def _reductions(
    cell: Cell, run: RunTrace, trained: Snapshots, unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield a finding for each rank of a stage that did not reduce the stage's gradients.

    Such a rank reduced none, or too few to be all.
    """
    without_gradient = unused(run)
    trainable = trained_elements(unwrapped)
    if trained:
        for info in trained[0].parameters:
            if info.name in without_gradient:
                trainable -= math.prod(info.shape)
    for snapshot in trained:
        yield from with_rank(snapshot, _reduced(cell, snapshot, trainable // cell.tp))


def _reduced(cell: Cell, snapshot: Snapshot, trainable: int) -> Iterator[str]:
    """Yield a finding if a rank reduced much less in a step than its trainable elements."""
    is_reducing = False
    reduced = 0
    for info in gradient_reductions(cell, snapshot):
        is_reducing = True
        reduced += info.calls * info.numel
    if not is_reducing:
        ops = sorted({info.op for info in snapshot.collectives})
        listed_ops = ", ".join(ops) or "none"
        collectives = f"(collectives: {listed_ops})"
        yield f"no gradient was reduced in a step {collectives}; ranks train on their own"
        return
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
    """Tensors that a rank holds with other values than the first rank that has a replica.

    Attributes:
        rank: The rank.
        peer: That first rank.
        names: The names of the tensors.
    """

    rank: int
    peer: int
    names: Sequence[str]


def _differing_replicas(run: RunTrace, trained: Snapshots, when: str) -> Iterator[str]:
    """Yield a finding for each rank that differs from the first one with the same tensors.

    Parameters come first, then optimizer state, then gradients; of these only the first kind that
    differs is told.
    """
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
            tensors_of_kind = f"{len(difference.names)} {kind}"
            differ = f"differ from rank {difference.peer}'s after {when}"
            first = f"first {difference.names[0]!r}{_named_stages(stages, difference)}"
            finding = f"{tensors_of_kind} {differ}, {first}; replicas must stay equal"
            yield f"rank {difference.rank}: {finding}"
        if differences:
            return  # what is made from them differs too


def _named_stages(stages: Mapping[int, int], difference: _ReplicaDifference) -> str:
    """Return, for a finding, that two stages of a pipeline have the tensors.

    The text is empty if the ranks are of one stage.
    """
    stage = stages.get(difference.rank)
    peer_stage = stages.get(difference.peer)
    if stage == peer_stage:
        return ""
    return f" (stages {peer_stage} and {stage} have them, and train them apart)"


def _replica_differences(tensors: Iterable[_HeldTensor]) -> list[_ReplicaDifference]:
    """Return which ranks hold other values than the first rank with the same tensors.

    The differences are in order of the rank, then of the peer.
    """
    first_replicas: dict[_Place, _HeldTensor] = {}
    names_by_ranks: dict[_RankAndPeer, list[str]] = defaultdict(list)
    for tensor in tensors:
        first = first_replicas.setdefault((tensor.name, tensor.region), tensor)
        if first.rank != tensor.rank and first.value != tensor.value:
            names_by_ranks[tensor.rank, first.rank].append(tensor.name)
    differences: list[_ReplicaDifference] = []
    for rank, peer in sorted(names_by_ranks):
        names = names_by_ranks[rank, peer]
        differences.append(_ReplicaDifference(rank, peer, names))
    return differences


def _held_parameters(trained: Snapshots, name_of: Callable[[str], str]) -> Iterator[_HeldTensor]:
    """Yield each rank's parameters."""
    for snapshot in trained:
        for info in snapshot.parameters:
            name = name_of(info.name)
            yield _HeldTensor(snapshot.rank, name, info.layout.region, info.digest)


def _held_optimizer_states(
    trained: Snapshots, name_of: Callable[[str], str]
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


def _held_gradients(trained: Snapshots, name_of: Callable[[str], str]) -> Iterator[_HeldTensor]:
    """Yield each rank's gradients of each step since the last snapshot."""
    for snapshot in trained:
        for nth, step in enumerate(snapshot.steps):
            for info in step.gradients:
                name = name_of(info.name)
                region = (nth, info.layout.region)
                yield _HeldTensor(snapshot.rank, name, region, info.square)
