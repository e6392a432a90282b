"""Does the strategy of the cell really run?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check, every_rank, gradient_reductions, named_ranks, requested
from pytest_distcompat.checks._values import (
    Names,
    by_stage,
    cut_along,
    expert_parts,
    held_states,
    stages_of,
    tp_copies,
    unused,
)
from pytest_distcompat.cost import trained_elements
from pytest_distcompat.scenario import STEPS, TRAIN
from pytest_distcompat.strategies import STRATEGIES, Strategy
from pytest_distcompat.trace import ModelInfo, ParameterInfo, RunTrace, Snapshot, Trace, UnwrappedInfo, shard_groups

#: The least part of the trainable elements that gradients are; even compressed ones are more, metrics and norms are less.
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
    strategy = STRATEGIES.get(cell.strategy)
    run = trace.run()
    built = run.at("build")
    yield from every_rank(built, cell.world_size, "build")
    for snapshot in built:
        if snapshot.model is None:
            yield f"rank {snapshot.rank}: no model after build; the driver must set self.model"
            continue
        found = list[str]()
        if not cell.only_tp or snapshot.model.wrappers:
            found += _wrapped(strategy, cell, snapshot.model, _left_out(strategy, cell, run))
        sizes = {
            "process group has": snapshot.model.world_size,
            "trainer believes in": snapshot.model.trainer_world_size,
        }
        for what, size in sizes.items():
            if size not in {None, cell.world_size}:
                found.append(f"the {what} {size} ranks; expected {cell.world_size}")
        found += _tensor_parallel(cell, run.unwrapped, snapshot)
        found += _whole_blocks(cell, run, snapshot)
        found += _pipelined(cell, run.unwrapped, snapshot.model)
        yield from (f"rank {snapshot.rank}: {text}" for text in found)
    for here, part in by_stage(run, built):
        if part is run.unwrapped or any(one.parameters for one in here):
            yield from _shards(strategy, cell, run, here, part)
    trained = run.trained
    yield from every_rank(trained, cell.world_size, "three steps")
    for here, part in by_stage(run, trained) if cell.world_size > cell.tp * cell.pp else ():
        live, without = here[0].parameters if here else (), unused(run)
        trainable = trained_elements(part) - sum(math.prod(info.shape) for info in live if info.name in without)
        for snapshot in here:
            yield from (f"rank {snapshot.rank}: {text}" for text in _reduced(cell, snapshot, trainable // cell.tp))
    for snapshot in trained:
        found = [*_sequence_cut(cell, snapshot), *_attends(cell, snapshot), *_cut_again(strategy, cell, snapshot)]
        yield from (f"rank {snapshot.rank}: {text}" for text in found)
    apart = [*_same_everywhere(run, trained, "three steps")]
    # Also after all steps: a rank may skip one, or leave DDP, at any time.
    yield from apart or _same_everywhere(run, run.at("step", STEPS - 1), f"{STEPS} steps")


def _left_out(strategy: Strategy, cell: Cell, run: RunTrace) -> Callable[[str], bool]:
    """Return a predicate: True for live parameters of modules left out of the sharding, which ``units`` checks."""
    unwrapped = run.unwrapped or UnwrappedInfo(())
    names = {info.name for info in unwrapped.parameters}
    prefixes = tuple(f"{module}." for module in unwrapped.ignored_modules)
    return lambda live: bool(prefixes) and strategy.canonical(live, cell, names).startswith(prefixes)


def _wrapped(strategy: Strategy, cell: Cell, model: ModelInfo, left_out: Callable[[str], bool]) -> Iterator[str]:
    alone = cell.world_size == 1
    running = ", ".join(f"{name} x {count}" for name, count in model.wrappers.items()) or "a bare model"
    # torch.compile's wrapper is no strategy. A DeepSpeed engine holds no wrapper of torch.
    others = set(model.wrappers) - {strategy.wrapper, "OptimizedModule"}
    may_be_bare = alone and strategy.bare_alone and not others
    if strategy.wrapper not in model.wrappers and not may_be_bare:
        yield f"{model.type} runs as {running}; expected {strategy.wrapper} for {strategy.name}"
    if others and strategy.wrapper in model.wrappers:
        yield f"also wrapped by {', '.join(sorted(others))}; expected {strategy.wrapper} alone"
    if model.zero_stage != strategy.zero_stage:
        yield f"ZeRO stage {model.zero_stage} is running; expected {strategy.zero_stage}"
    kinds = {strategy.kind, "FlatParameter"}
    if alone and strategy.kind_alone:
        kinds.add(strategy.kind_alone)
    unlike = (info for info in model.parameters if info.kind not in kinds)
    wrong = [f"{info.name!r} is a {info.kind}" for info in unlike if not left_out(info.name)]
    if wrong or not (model.parameters or model.pp_ranks):
        found = f"{len(wrong)} of {len(model.parameters)} parameters are not of kind {strategy.kind}"
        yield f"{found}, {wrong[0] if wrong else 'there is none'}"


def _tensor_parallel(cell: Cell, unwrapped: UnwrappedInfo | None, snapshot: Snapshot) -> Iterator[str]:
    """Yield findings unless layers are cut along ``tp``, and experts along ``ep``, in as many parts as were asked for."""
    for name, what, kind in (("tp", "layers", "tensor"), ("ep", "experts", "expert")):
        if not requested(cell, unwrapped, name):
            continue
        dims = (info.layout.dim(name) for info in snapshot.parameters if cut_along(info, name))
        sizes, wanted = {dim.size for dim in dims if dim}, int(cell.option(name))
        if sizes - {1} != {wanted} - {1}:
            found = f"in {', '.join(map(str, sorted(sizes)))} parts" if sizes else "whole on each rank"
            expected = f"expected {wanted} parts of {kind} parallelism, along a mesh dimension named {name!r}"
            yield f"{what} are {found}; {expected}"


def _whole_blocks(cell: Cell, run: RunTrace, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding if tensor parallelism has cut some layers, and none of a block: a plan's names do not fit a wrapped one."""
    unwrapped = run.unwrapped
    if cell.tp == 1 or unwrapped is None:
        return
    names = Names(run, unwrapped)
    layers = [
        # Experts that are spread need not be cut.
        (names(info.name), cut_along(info, "tp") or cut_along(info, "ep"))
        for info in snapshot.parameters
        if len(info.shape) > 1
    ]
    inside = {block: [cut for name, cut in layers if name.startswith(f"{block}.")] for block in unwrapped.blocks}
    whole = [block for block, cuts in inside.items() if cuts and not any(cuts)]
    if whole and any(cut_along(info, "tp") for info in snapshot.parameters):
        found = f"{', '.join(map(repr, whole[:2]))}{f' and {len(whole) - 2} others' if len(whole) > 2 else ''}"
        yield f"of the blocks {found} no layer is cut; expected {cell.tp} parts of tensor parallelism in each block"


def _pipelined(cell: Cell, unwrapped: UnwrappedInfo | None, model: ModelInfo) -> Iterator[str]:
    """Yield a finding unless the model was cut into stages for as many ranks as were asked for."""
    if not requested(cell, unwrapped, "pp"):
        return
    expected = f"expected the layers of some of the stages on each of {cell.pp} ranks (pp {cell.pp})"
    if (found := len(model.pp_ranks) or 1) != cell.pp:
        yield f"the model is on {found} rank{'s' * (found > 1)} of a pipeline; {expected}"
    elif cell.pp > 1 and unwrapped and not 0 < len(model.parameters) < len(unwrapped.parameters):
        share = f"all {len(model.parameters)}" if model.parameters else "no"
        yield f"the model has {share} parameters; {expected}"


def _sequence_cut(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless the sums of the parts of a layer were scattered, as sequence parallelism does."""
    if not cell.option("sp"):
        return
    # An all-gather proves nothing: the logits of a cut vocabulary are gathered too.
    peers = cell.tp_peers(snapshot.rank)
    ops = {info.op for info in snapshot.collectives if set(info.ranks) == {*peers} and "float" in info.dtype}
    if not any(op.startswith("reduce_scatter") for op in ops):
        found = f"(collectives of activations: {', '.join(sorted(ops)) or 'none'})"
        expected = "expected sequence parallelism to cut what lies between layers along the sequence"
        yield f"no sum of {named_ranks(peers, 0)} was scattered in a step {found}; {expected}"


def _attends(cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless the ranks of a sequence exchanged something among themselves."""
    # Where the same ranks share one sequence and all shards, that of parameters proves nothing; there ``parity`` is left.
    peers = {*cell.cp_peers(snapshot.rank)}
    if cell.cp > 1 and not any(set(info.ranks) == peers and "float" in info.dtype for info in snapshot.collectives):
        expected = (
            f"context parallelism (cp {cell.cp}): attention to the keys and values of the other parts of the sequence"
        )
        yield f"{named_ranks(sorted(peers), 0)} exchanged nothing among themselves in a step; expected {expected}"


def _cut_again(strategy: Strategy, cell: Cell, snapshot: Snapshot) -> Iterator[str]:
    """Yield a finding unless ZeRO++ had cut all weights a second time (hpZ), among as many ranks as it was asked to."""
    # DeepSpeed takes all ranks where there are fewer: the size of a node, on the two ranks of a test.
    wanted = min(int(cell.settings("ds_config").get("zero_optimization.zero_hpz_partition_size", 1)), cell.world_size)
    found = {step.secondary for step in snapshot.steps}
    if strategy.shards and wanted > 1 and found != {wanted}:
        sizes = " and ".join(map(str, sorted(found - {0})))
        expected = f"expected one among {wanted} (zero_hpz_partition_size), when the optimizer steps"
        yield f"the secondary partition of weights is {f'among {sizes} ranks' if sizes else 'nowhere'}; {expected}"


def _shards(
    strategy: Strategy, cell: Cell, run: RunTrace, built: tuple[Snapshot, ...], unwrapped: UnwrappedInfo | None
) -> Iterator[str]:
    """Yield findings unless the ranks of a stage store each parameter once together if sharded, once each if replicated."""
    size, left_out = cell.world_size // cell.pp, _left_out(strategy, cell, run)
    whole = {one.name: math.prod(one.shape) for one in (unwrapped.parameters if unwrapped else ())}
    total = sum(numel for name, numel in whole.items() if not left_out(name))
    if not total:
        yield "the unwrapped model has no parameters, or was not recorded"
        return

    def copies_in(parts: list[tuple[Snapshot, set[int]]]) -> float:
        stored = (
            (info, one.rank, len(own)) for one, own in parts for info in one.parameters if not left_out(info.name)
        )
        return sum(_part(info, cell, rank) * ranks for info, rank, ranks in stored) / total

    if not strategy.shards:
        expected, each = size // cell.tp, f"{cell.tp} ranks of tensor parallelism" if cell.tp > 1 else "rank"
        if abs((copies := copies_in([(one, {*one.ranks}) for one in built])) - expected) > 0.01:
            where = "all ranks" if cell.pp == 1 else named_ranks([one.rank for one in built], cell.world_size)
            yield f"{where} together store {copies:.2f} copies of the parameters; expected {expected}, one a {each}"
        return
    groups = _groups(built, left_out, cell.world_size)
    count = size // len(groups[0]) if run.simulated else len(groups)
    wanted, alone = cell.option("dp_replicate"), count == size > 1
    if alone or (requested(cell, unwrapped, "dp_replicate") and count != wanted):
        found = "; ".join(named_ranks(ranks, cell.world_size) for ranks in groups)
        more = ", of several ranks" if alone else ""
        yield f"shards are in {count} copies ({found}); expected {wanted}{more}"
    for ranks in groups if size > 1 else ():
        parts = [(one, own) for one in built if (own := {*one.ranks}.intersection(ranks))]
        holders = named_ranks(ranks, cell.world_size)
        # More than one copy may be padding: ZeRO-3 pads every shard, which shows on tiny parameters.
        if not 0.99 <= (copies := copies_in(parts)) < max(1.01, (1 + len(ranks)) / 2):
            yield f"{holders} together store {copies:.2f} copies of the parameters; expected 1, each rank its shard"
            continue
        found_here = _each_once(strategy, cell, whole, parts)
        yield from (f"{holders} together store {text}" for name, text in found_here if not left_out(name))


def _part(info: ParameterInfo, cell: Cell, rank: int) -> float:
    """Return the elements that the rank stores, divided by how many ranks of tensor parallelism store the same.

    An expert that is here instead of others counts for these too.
    """
    return info.local_numel * expert_parts(info) / tp_copies(info, cell, rank)


def _groups(
    built: tuple[Snapshot, ...], left_out: Callable[[str], bool], world_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each copy of the model: those that hold any of its parameters together."""
    holders: dict[int, set[int]] = defaultdict(set)
    for snapshot in built:
        for info in snapshot.parameters:
            if not left_out(info.name):
                holders[snapshot.rank] |= {*info.layout.holders, snapshot.rank}
    return shard_groups({rank: tuple(sorted(ranks)) for rank, ranks in holders.items()}, world_size)


def _each_once(
    strategy: Strategy, cell: Cell, whole: Mapping[str, int], parts: list[tuple[Snapshot, set[int]]]
) -> Iterator[tuple[str, str]]:
    """Yield each parameter that the ranks do not store once, with a finding: a small one hardly shows in the sum."""
    # Flat parameters have no names to compare by. A parameter without a live counterpart is a finding of the check ``names``.
    stored: dict[str, float] = defaultdict(float)
    flat: set[str] = set()
    ranks = sum(len(own) for _, own in parts)
    for snapshot, own in parts:
        for info in snapshot.parameters:
            name = strategy.canonical(info.name, cell, whole)
            stored[name] += _part(info, cell, snapshot.rank) * len(own)
            flat |= {name} if info.layout.flat else set()
    for name, numel in whole.items():
        # Only what is cut flat is padded.
        most = max(numel + ranks - 1, numel * (1 + ranks) / 2) if name in flat else numel
        if name in stored and not numel <= stored[name] <= most:
            yield name, f"{stored[name]:g} elements of {name!r}, which has {numel}; expected each one once"


def _reduced(cell: Cell, snapshot: Snapshot, trainable: int) -> Iterator[str]:
    reductions = [info.calls * info.numel for info in gradient_reductions(cell, snapshot)]
    if not reductions:
        ops = ", ".join(sorted({info.op for info in snapshot.collectives})) or "none"
        yield f"no gradient was reduced in a step (collectives: {ops}); ranks train on their own"
    elif (most := sum(reductions)) < MIN_REDUCED_FRACTION * trainable:
        found = f"only {most} elements were reduced in a step, of {trainable} trainable ones"
        yield f"{found}; that is no gradient, ranks train on their own"


def _same_everywhere(run: RunTrace, trained: tuple[Snapshot, ...], when: str) -> Iterator[str]:
    """Yield a finding for each rank that holds something else than the first one with the same part of the same tensor."""
    # Tied parameters have different names on different stages.
    stages = stages_of(run)
    for what, held in _replicated(trained, Names(run, run.unwrapped) if stages and run.unwrapped else str):
        first: dict[Hashable, tuple[int, Hashable]] = {}
        apart: dict[tuple[int, int], list[str]] = defaultdict(list)
        for rank, name, region, value in held:
            peer, expected = first.setdefault((name, region), (rank, value))
            if peer != rank and value != expected:
                apart[rank, peer].append(name)
        for (rank, peer), names in sorted(apart.items()):
            here, there = stages.get(rank), stages.get(peer)
            both = f" (stages {there} and {here} have them, and train them apart)" if here != there else ""
            found = f"{len(names)} {what} differ from rank {peer}'s after {when}, first {names[0]!r}{both}"
            yield f"rank {rank}: {found}; replicas must stay equal"
        if apart:
            return  # what is made from them differs too


def _replicated(
    trained: tuple[Snapshot, ...], named: Callable[[str], str]
) -> Iterator[tuple[str, Iterator[tuple[int, str, Hashable, Hashable]]]]:
    """Yield each kind of tensor, with (rank, name, region, value) of what each rank holds."""
    infos = ((one.rank, info) for one in trained for info in one.parameters)
    yield "parameters", ((rank, named(info.name), info.layout.region, info.digest) for rank, info in infos)
    # Flat partitions have no names; ``masters`` are their parts.
    states = (
        (one.rank, f"{state.key} of {named(state.owner)}", state.layout.region, state.digest)
        for one in trained
        for state in (*held_states(one), *one.masters)
        # A plain number may be of the rank's own loss, as LBFGS keeps it.
        if not state.owner.startswith("partition ") and state.dtype != "float"
    )
    yield "tensors of the optimizer's state", states
    gradients = (
        (one.rank, named(info.name), (nth, info.layout.region), info.square)
        for one in trained
        for nth, step in enumerate(one.steps)
        for info in step.gradients
    )
    yield "gradients", gradients
