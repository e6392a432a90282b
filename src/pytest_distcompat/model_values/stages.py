"""Stages of pipelines: which ranks hold which layers of a model, so that checks look at each alone.

Under pipeline parallelism each rank holds a stage, some consecutive layers of the model. Ranks 0
and 1 of 4 may hold the first half, ranks 2 and 3 the second: ``{0: 0, 1: 0, 2: 1, 3: 1}`` is the
stage of each. A check of single tensors, such as ``memory``, calls ``by_stage`` and compares the
ranks of a stage with their part of the unwrapped model. That part is what they hold, so a parameter
that no stage holds is in none. The check ``names`` reports it, since it looks at all stages of a
pipeline together (``across_stages``). Without a pipeline there is one stage, the whole model.
``Ranks`` is a tuple of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_distcompat.model_values.whole import Names, Ranks
from pytest_distcompat.trace import RunTrace, Snapshot, UnwrappedInfo
from pytest_distcompat.wording import named_ranks


def pipelines_of(run: RunTrace) -> Mapping[int, Ranks]:
    """Return for each rank the ranks of its pipeline, in the order of their stages.

    On 4 ranks with two pipelines of two stages that is ``{0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1,
    3)}``. A rank that holds a whole model has an empty tuple.
    """
    pipelines: dict[int, Ranks] = {}
    for snapshot in run.at("build"):
        if snapshot.model:
            pipelines[snapshot.rank] = snapshot.model.pp_ranks
    return pipelines


def stages_of(run: RunTrace) -> Mapping[int, int]:
    """Return the number of the pipeline stage that each rank holds; empty without a pipeline."""
    stage_of_rank: dict[int, int] = {}
    for rank, pipeline in pipelines_of(run).items():
        if pipeline:
            stage_of_rank[rank] = pipeline.index(rank)
    return stage_of_rank


def stages_by_parameter(
    run: RunTrace, name_of: Callable[[str], str] = str
) -> Mapping[str, set[int]]:
    """Return the pipeline stages that hold each parameter; 0 alone without a pipeline.

    A tied parameter, such as embedding and output layer in one, may be on two stages.

    Args:
        run: The run.
        name_of: Returns the name under which a parameter of the live model counts.
    """
    stage_of_rank = stages_of(run)
    stages: dict[str, set[int]] = defaultdict(set)
    for snapshot in run.at("build"):
        for info in snapshot.parameters:
            stages[name_of(info.name)].add(stage_of_rank.get(snapshot.rank, 0))
    return stages


def by_stage(
    run: RunTrace, snapshots: tuple[Snapshot, ...]
) -> Iterator[tuple[tuple[Snapshot, ...], UnwrappedInfo | None]]:
    """Yield for each stage of a pipeline its ranks' snapshots and its part of the unwrapped model.

    A run without a pipeline yields once: all snapshots and the whole model.
    """
    stage_of_rank = stages_of(run)
    unwrapped = run.unwrapped
    if not stage_of_rank or unwrapped is None:
        yield snapshots, unwrapped
        return
    # ``names(...)`` takes a name of the wrapped or the unwrapped model, and returns that in the
    # unwrapped one; of tied parameters the first.
    names = Names(run, unwrapped)
    for stage in sorted(set(stage_of_rank.values())):
        stage_names: set[str] = set()
        for snapshot in run.at("build"):
            if stage_of_rank.get(snapshot.rank) == stage:
                stage_names.update(
                    names(info.name) for info in (*snapshot.parameters, *snapshot.buffers)
                )
        stage_snapshots = []
        for snapshot in snapshots:
            if stage_of_rank.get(snapshot.rank) == stage:
                stage_snapshots.append(snapshot)
        yield tuple(stage_snapshots), _part_of_model(unwrapped, names, stage_names)


def _part_of_model(unwrapped: UnwrappedInfo, names: Names, stage_names: set[str]) -> UnwrappedInfo:
    """Return the unwrapped model with only the parameters, buffers and blocks of one stage.

    Blocks are the modules that are wrapped one by one: ``layers.0``.
    """
    parameters = []
    for info in unwrapped.parameters:
        if names(info.name) in stage_names:
            parameters.append(info)
    buffers = []
    for info in unwrapped.buffers:
        if names(info.name) in stage_names:
            buffers.append(info)
    blocks = []
    for block in unwrapped.blocks:
        if any(name.startswith(f"{block}.") for name in stage_names):
            blocks.append(block)
    return replace(
        unwrapped, parameters=tuple(parameters), buffers=tuple(buffers), blocks=tuple(blocks)
    )


def across_stages(run: RunTrace, groups: Iterable[Ranks]) -> tuple[Ranks, ...]:
    """Return the ranks of each copy of a model, given those of each copy of one of its stages.

    With the pipelines (0, 2) and (1, 3) the group (0, 1), which holds a sharded first stage
    together, becomes (0, 1, 2, 3).
    """
    pipelines = pipelines_of(run)
    copies: set[Ranks] = set()
    for group in groups:
        ranks = set(group)
        for rank in group:
            ranks.update(pipelines.get(rank, ()))
        copies.add(tuple(sorted(ranks)))
    return tuple(sorted(copies))


def named_stage(run: RunTrace, ranks: Sequence[int]) -> str:
    """Return how a finding names ranks: ``ranks 0 and 1 (stage 0)``.

    The stage is there if there is a pipeline and all of the ranks hold the same stage.
    """
    stage_of_rank = stages_of(run)
    words = named_ranks(ranks, run.world_size)
    stages = set()
    for rank in ranks:
        if rank in stage_of_rank:
            stages.add(stage_of_rank[rank])
    if len(stages) != 1:
        return words
    return f"{words} (stage {stages.pop()})"
