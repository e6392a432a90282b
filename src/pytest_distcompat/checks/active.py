"""Does the strategy of the cell really run?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import REDUCTIONS, check, every_rank, named_ranks, requested
from pytest_distcompat.checks._values import unused
from pytest_distcompat.cost import trained_elements
from pytest_distcompat.scenario import TRAIN
from pytest_distcompat.strategies import STRATEGIES, Strategy
from pytest_distcompat.trace import ModelInfo, RunTrace, Snapshot, Trace, UnwrappedInfo

#: The least part of the trainable elements that gradients are; even compressed ones are more, metrics and norms are less.
MIN_REDUCED_FRACTION = 0.1


@check(scenario=TRAIN, until=(("train", "step", 2),), order=0)
def active(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that the strategy really runs.

    Wrapper, kind of parameters, ZeRO stage, world size and shards are its own. Gradients are reduced, and replicas stay
    equal.

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
        yield from _wrapped(strategy, snapshot.rank, snapshot.model, _left_out(strategy, cell, run))
        yield from _worlds(cell, snapshot.rank, snapshot.model)
    yield from _shards(strategy, cell, run)
    trained = run.at("step", 2)
    yield from every_rank(trained, cell.world_size, "three steps")
    if cell.world_size > 1:
        live, without = trained[0].model.parameters if trained and trained[0].model else (), unused(run)
        trainable = trained_elements(run.unwrapped)
        trainable -= sum(math.prod(info.shape) for info in live if info.name in without)
        for snapshot in trained:
            yield from _reduced(snapshot, trainable)
        # A replica holds the whole model, so each rank is a copy.
        copies = run.replicas if strategy.shards else tuple((rank,) for rank in range(cell.world_size))
        yield from _same_everywhere(trained, copies)


def _left_out(strategy: Strategy, cell: Cell, run: RunTrace) -> Callable[[str], bool]:
    """Return a predicate: True for live parameters of modules left out of the sharding, which ``units`` checks."""
    unwrapped = run.unwrapped
    names = {info.name for info in unwrapped.parameters} if unwrapped else set()
    prefixes = tuple(f"{module}." for module in unwrapped.ignored_modules) if unwrapped else ()
    return lambda live: bool(prefixes) and strategy.canonical(live, cell, names).startswith(prefixes)


def _wrapped(strategy: Strategy, rank: int, model: ModelInfo, left_out: Callable[[str], bool]) -> Iterator[str]:
    running = ", ".join(f"{name} x {count}" for name, count in model.wrappers.items()) or "a bare model"
    if strategy.wrapper not in model.wrappers:
        yield f"rank {rank}: {model.type} runs as {running}; expected {strategy.wrapper} for {strategy.name}"
    # torch.compile's wrapper is no strategy. A DeepSpeed engine holds no wrapper of torch.
    others = set(model.wrappers) - {strategy.wrapper, "OptimizedModule"}
    if others and strategy.wrapper in model.wrappers:
        yield f"rank {rank}: also wrapped by {', '.join(sorted(others))}; expected {strategy.wrapper} alone"
    if model.zero_stage != strategy.zero_stage:
        yield f"rank {rank}: ZeRO stage {model.zero_stage} is running; expected {strategy.zero_stage}"
    wrong = [
        info
        for info in model.parameters
        if info.kind not in {strategy.kind, "FlatParameter"} and not left_out(info.name)
    ]
    if wrong or not model.parameters:
        first = wrong[0] if wrong else None
        example = f"{first.name!r} is a {first.kind}" if first else "there is none"
        total = len(model.parameters)
        yield f"rank {rank}: {len(wrong)} of {total} parameters are not of kind {strategy.kind}, {example}"


def _worlds(cell: Cell, rank: int, model: ModelInfo) -> Iterator[str]:
    if model.world_size != cell.world_size:
        yield f"rank {rank}: the process group has {model.world_size} ranks; expected {cell.world_size}"
    if model.trainer_world_size not in {None, cell.world_size}:
        yield f"rank {rank}: the trainer believes in {model.trainer_world_size} ranks; expected {cell.world_size}"


def _shards(strategy: Strategy, cell: Cell, run: RunTrace) -> Iterator[str]:
    """Yield findings unless the ranks store each parameter once together if sharded, once each if replicated."""
    built, unwrapped, left_out = run.at("build"), run.unwrapped, _left_out(strategy, cell, run)
    total = sum(math.prod(info.shape) for info in unwrapped.parameters if not left_out(info.name)) if unwrapped else 0
    if not total or unwrapped is None:
        yield "the unwrapped model has no parameters, or was not recorded"
        return

    def stored(ranks: tuple[int, ...]) -> float:
        infos = (info for snapshot in built if snapshot.rank in ranks for info in snapshot.parameters)
        return sum(info.local_numel for info in infos if not left_out(info.name)) / total

    if not strategy.shards:
        if abs((copies := stored(tuple(range(cell.world_size)))) - cell.world_size) > 0.01:
            yield f"all ranks together store {copies:.2f} copies of the parameters; expected {cell.world_size}, one a rank"
        return
    expected, groups = cell.option("dp_replicate"), run.replicas
    alone = len(groups) == cell.world_size > 1
    if alone or (requested(cell, unwrapped, "dp_replicate") and len(groups) != expected):
        found = "; ".join(named_ranks(ranks, cell.world_size) for ranks in groups)
        more = ", of several ranks" if alone else ""
        yield f"shards are in {len(groups)} copies ({found}); expected {expected}{more}"
    for ranks in groups if cell.world_size > 1 else ():
        copies, holders = stored(ranks), named_ranks(ranks, cell.world_size)
        # More than one copy may be padding: ZeRO-3 pads every shard, which shows on tiny parameters.
        if not 0.99 <= copies < max(1.01, (1 + len(ranks)) / 2):
            yield f"{holders} together store {copies:.2f} copies of the parameters; expected 1, each rank its shard"
        else:
            yield from _each_once(strategy, cell, unwrapped, [one for one in built if one.rank in ranks], left_out)


def _each_once(
    strategy: Strategy, cell: Cell, unwrapped: UnwrappedInfo, built: list[Snapshot], left_out: Callable[[str], bool]
) -> Iterator[str]:
    """Yield a finding for each parameter that the ranks do not store once: a small one hardly shows in the sum."""
    # Flat parameters have no names to compare by. A parameter without a live counterpart is a finding of the check ``names``.
    whole = {info.name: math.prod(info.shape) for info in unwrapped.parameters}
    stored: Counter[str] = Counter()
    for snapshot in built:
        for info in snapshot.parameters:
            stored[strategy.canonical(info.name, cell, whole)] += info.local_numel
    ranks = tuple(snapshot.rank for snapshot in built)
    for name, numel in whole.items():
        most = max(numel + len(ranks) - 1, numel * (1 + len(ranks)) / 2)
        if name in stored and not numel <= stored[name] <= most and not left_out(name):
            found = f"{stored[name]} elements of {name!r}, which has {numel}"
            yield f"{named_ranks(ranks, cell.world_size)} together store {found}; expected each one once"


def _reduced(snapshot: Snapshot, trainable: int) -> Iterator[str]:
    reductions = [info for info in snapshot.collectives if info.op in REDUCTIONS and info.numel > 1]
    if not reductions:
        ops = ", ".join(sorted({info.op for info in snapshot.collectives})) or "none"
        yield f"rank {snapshot.rank}: no gradient was reduced in a step (collectives: {ops}); ranks train on their own"
        return
    most = sum(info.calls * info.numel for info in reductions if "float" in info.dtype)
    if most < MIN_REDUCED_FRACTION * trainable:
        yield (
            f"rank {snapshot.rank}: only {most} elements were reduced in a step, of {trainable} trainable ones; "
            "that is no gradient, ranks train on their own"
        )


def _same_everywhere(trained: tuple[Snapshot, ...], copies: tuple[tuple[int, ...], ...]) -> Iterator[str]:
    """Yield a finding for each rank that differs from the rank in the same position of the first copy."""
    models = {snapshot.rank: snapshot.model for snapshot in trained if snapshot.model}
    pairs = [pair for copy in copies[1:] for pair in zip(copies[0], copy, strict=False)]
    for first, rank in sorted(pairs, key=lambda pair: pair[1]):
        if first not in models or rank not in models:
            continue
        values = {info.name: info.digest for info in models[first].parameters}
        apart = [info.name for info in models[rank].parameters if values.get(info.name) != info.digest]
        if apart:
            yield (
                f"rank {rank}: {len(apart)} parameters differ from rank {first}'s after three steps, "
                f"first {apart[0]!r}; replicas must stay equal"
            )
