"""A trainer's tensors, put together from what each rank holds of them, and their comparison.

Tensors go by their name in the unwrapped model. The digest of a tensor can be computed from the
digests of its shards, so a run on 2 ranks compares with one on 4, and with one that shards another
way: no tensor is ever gathered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_distcompat.cell import Cell
from pytest_distcompat.cost import BYTES
from pytest_distcompat.digests import combine, concatenate
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    REPLICATE,
    STAGE,
    ParameterInfo,
    RunTrace,
    Snapshot,
    StateInfo,
    UnwrappedInfo,
    shard_groups,
)
from pytest_distcompat.wording import and_others, named_ranks

#: State keys that hold the factors of a moment: torch's Adafactor, then transformers'.
#: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html
FACTORS = frozenset({"row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col"})

#: The evidence that a library turned TF32 on. (A user who wants it sets it before the build.)
TF32_SINCE_BUILD = "products of float32 are in TF32 since build"

#: What a tensor is: ``parameter``, ``buffer``, ``master``, or the key of an optimizer state, such
#: as ``exp_avg`` or ``step``.
Kind = str
#: By unwrapped name the digest of the tensor; several where its replicas differ.
Digests = Mapping[str, tuple[str, ...]]
#: Ranks that together hold one copy of a tensor or model: a shard group.
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Values:
    """Digests of whole tensors: what the ranks of a run hold together, however it is sharded.

    Attributes:
        digests: By kind the digests by unwrapped name.
        wrong: Findings about tensors whose parts do not add up to the whole.
        not_elementwise: The kinds of state that do not have an element for each element of a
            parameter.
        dtypes: By kind and unwrapped name the dtypes that the parts are stored in.
    """

    digests: Mapping[Kind, Digests]
    wrong: tuple[str, ...] = ()
    not_elementwise: frozenset[Kind] = frozenset()
    dtypes: Mapping[Kind, Mapping[str, frozenset[str]]] = field(default_factory=dict)

    def of(self, kind: Kind) -> Digests:
        """Return the digests of one kind by unwrapped name."""
        return self.digests.get(kind, {})


class Names:
    """Map from the names that a run's wrapped model has to those of the unwrapped model.

    Tied parameters all get the name of the first of them.
    """

    def __init__(self, run: RunTrace, unwrapped: UnwrappedInfo) -> None:
        self.cell = Cell.parse(run.cell)
        self.strategy = STRATEGIES.get(self.cell.strategy)
        self.tied_to: dict[str, str] = {}
        for group in unwrapped.tied:
            self.tied_to.update(dict.fromkeys(group, group[0]))
        self.sizes: dict[str, int] = {}
        for info in (*unwrapped.parameters, *unwrapped.buffers):
            self.sizes[info.name] = math.prod(info.shape)
        self.persistent: set[str] = set()
        for info in unwrapped.buffers:
            if info.persistent:
                self.persistent.add(info.name)
        self.known = {*self.sizes, *unwrapped.state_dict}
        self._unwrapped_by_live_name: dict[str, str] = {}

    def __call__(self, live: str) -> str:
        # Stored: each rank and each key of its state has the same names.
        if live not in self._unwrapped_by_live_name:
            name = self.strategy.canonical(live, self.cell, self.known)
            self._unwrapped_by_live_name[live] = self.tied_to.get(name, name)
        return self._unwrapped_by_live_name[live]


@dataclass(frozen=True)
class _HeldTensor:
    """What one rank holds of a tensor.

    Attributes:
        kind: What the tensor is.
        name: Its name, or that of its parameter, in the unwrapped model.
        rank: The rank.
        info: The record of the rank's probe.
        numel: How many elements the rank holds.
    """

    kind: Kind
    name: str
    rank: int
    info: ParameterInfo | StateInfo
    numel: int


def values(run: RunTrace, snapshots: tuple[Snapshot, ...]) -> Values:
    """Return what all ranks together hold at these snapshots of that run."""
    if run.unwrapped is None:
        return Values({}, ("the unwrapped model was not recorded",))
    names = Names(run, run.unwrapped)
    parts_by_tensor: dict[tuple[Kind, str], list[_HeldTensor]] = defaultdict(list)
    for snapshot in snapshots:
        for part in _held_tensors(snapshot, names):
            parts_by_tensor[part.kind, part.name].append(part)
    dtypes: dict[Kind, dict[str, frozenset[str]]] = defaultdict(dict)
    for (kind, name), parts in parts_by_tensor.items():
        dtypes[kind][name] = frozenset(part.info.dtype for part in parts)
    not_elementwise = not_elementwise_kinds(snapshots)
    digests: dict[Kind, dict[str, tuple[str, ...]]] = defaultdict(dict)
    wrong: list[str] = []
    for kind, name in sorted(parts_by_tensor):
        parts = parts_by_tensor[kind, name]
        if kind in not_elementwise or kind == "step":
            # Of step counts there is one for each parameter, or for each flat partition of a rank.
            digests[kind][name] = tuple(sorted({part.info.digest for part in parts}))
            continue
        tensor_digests: set[str] = set()
        for ranks in _copies(parts, parts_by_tensor.get(("parameter", name), [])):
            copy = _put_together(parts, ranks, names.sizes.get(name), run.world_size)
            if copy.problem:
                wrong.append(f"{kind} {name!r}: {copy.problem}")
            if copy.digest:
                tensor_digests.add(copy.digest)
        digests[kind][name] = tuple(sorted(tensor_digests))
    return Values(digests, tuple(wrong), not_elementwise, dtypes)


def not_elementwise_kinds(snapshots: tuple[Snapshot, ...]) -> frozenset[Kind]:
    """Return the kinds of state that do not have one element for each element of the parameter."""
    # Such state is one number (NAdam's ``mu_product``), or a factor of a moment (Adafactor).
    # Parameters of one element are passed over: for them the sizes always agree.
    kinds: set[Kind] = set()
    elementwise: set[Kind] = set()
    for snapshot in snapshots:
        numel_by_parameter: dict[str, int] = {}
        for info in snapshot.parameters:
            if info.local_numel > 1:
                numel_by_parameter[info.name] = info.local_numel
        for state in snapshot.states:
            if state.key == "step" or not state.numel or state.owner not in numel_by_parameter:
                continue
            kinds.add(state.key)
            if state.numel == numel_by_parameter[state.owner]:
                elementwise.add(state.key)
    return frozenset(kinds - elementwise) | FACTORS


def _held_tensors(snapshot: Snapshot, names: Names) -> Iterator[_HeldTensor]:
    """Yield what a rank holds of each parameter, persistent buffer, state and master weight.

    Of the flat partitions of ZeRO, which mix several parameters, only the step counts are compared.
    """
    rank = snapshot.rank
    for info in snapshot.parameters:
        yield _HeldTensor("parameter", names(info.name), rank, info, info.local_numel)
    for info in snapshot.buffers:
        name = names(info.name)
        if name in names.persistent:
            yield _HeldTensor("buffer", name, rank, info, info.local_numel)
    for state in (*held_states(snapshot), *snapshot.masters):
        if not state.owner.startswith("partition "):
            yield _HeldTensor(state.key, names(state.owner), rank, state, state.numel)
        elif state.key == "step":
            yield _HeldTensor("step", "partitions", rank, state, state.numel)


def _copies(
    parts: Sequence[_HeldTensor], parameter_parts: Sequence[_HeldTensor]
) -> tuple[Ranks, ...]:
    """Return, for each copy of a tensor in the run, the ranks that hold it together.

    With HSDP on 4 ranks in 2 replicas, for example, a parameter has two copies: ((0, 1), (2, 3)).

    Args:
        parts: What the ranks hold of the tensor.
        parameter_parts: What they hold of the parameter that the tensor belongs to.
    """
    groups = shard_groups({part.rank: part.info.layout.holders for part in parts})
    parameter_groups = shard_groups(
        {part.rank: part.info.layout.holders for part in parameter_parts}
    )
    for group in groups:
        if len(group) > 1 and group in parameter_groups:
            # The state is sharded like its parameter, so each copy of the parameter should have
            # one, even where no rank of that copy recorded any.
            return tuple(sorted({*groups, *parameter_groups}))
    return groups


@dataclass(frozen=True)
class _WholeTensor:
    """One copy of a tensor, put together from its parts.

    Attributes:
        digest: Its digest; empty if the parts do not make up the tensor.
        problem: What is wrong with the parts, as words; empty if nothing is.
    """

    digest: str = ""
    problem: str = ""


def _put_together(
    parts: Sequence[_HeldTensor], ranks: Ranks, numel: int | None, world_size: int
) -> _WholeTensor:
    """Return the copy of a tensor that some ranks hold together.

    Args:
        parts: What all ranks of the run hold of the tensor.
        ranks: The ranks of the copy, in the order of their shards.
        numel: The number of elements in the unwrapped model; None if that has no such tensor.
        world_size: The number of ranks of the run.
    """
    group_parts = []
    for part in parts:
        if part.rank in ranks:
            group_parts.append(part)
    group_parts.sort(key=lambda part: ranks.index(part.rank))
    digests = [part.info.digest for part in group_parts]
    if numel is None:
        digest = digests[0] if digests else ""
        return _WholeTensor(digest, "is no name of the unwrapped model")
    elements = sum(part.numel for part in group_parts)
    if elements != numel:
        words = f"the parts of {named_ranks(ranks, world_size)} are {elements} elements"
        return _WholeTensor(problem=f"{words}; expected {numel}")
    if any(part.info.layout.flat for part in group_parts):
        return _WholeTensor(concatenate(digests))
    return _WholeTensor(combine(digests))


def pipelines_of(run: RunTrace) -> Mapping[int, Ranks]:
    """Return for each rank the ranks of its pipeline, by stage; none if it holds a whole model."""
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
    """Return the unwrapped model with only the parameters, buffers and blocks of one stage."""
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
    """Return the ranks of each copy of a model, given those of each copy of one of its stages."""
    pipelines = pipelines_of(run)
    copies: set[Ranks] = set()
    for group in groups:
        ranks = set(group)
        for rank in group:
            ranks.update(pipelines.get(rank, ()))
        copies.add(tuple(sorted(ranks)))
    return tuple(sorted(copies))


def named_stage(run: RunTrace, ranks: Sequence[int]) -> str:
    """Return how a finding names ranks: with the stage, if all hold the same one of a pipeline."""
    stage_of_rank = stages_of(run)
    words = named_ranks(ranks, run.world_size)
    stages = set()
    for rank in ranks:
        if rank in stage_of_rank:
            stages.add(stage_of_rank[rank])
    if len(stages) != 1:
        return words
    return f"{words} (stage {stages.pop()})"


def trainable_names(parameters: Iterable[ParameterInfo]) -> set[str]:
    """Return the names of the parameters that are trained."""
    return {info.name for info in parameters if info.trainable}


def is_sharded_along(info: ParameterInfo, name: str) -> bool:
    """Tell whether the parameter is sharded along the mesh dimension of that name."""
    dim = info.layout.dim(name)
    return dim is not None and dim.placement not in {REPLICATE, "Partial"}


def tp_copies(info: ParameterInfo, cell: Cell, rank: int) -> int:
    """Return how many copies of a parameter the ranks of one tensor-parallel group hold.

    They hold one copy together of what tensor parallelism shards, and of experts that are spread
    over them; of any other parameter each of them has a copy.

    Args:
        info: The parameter as a rank holds it.
        cell: The cell of the run.
        rank: That rank.
    """
    peers = set(cell.tp_peers(rank))
    if peers.issubset(info.layout.holders):
        return 1
    return cell.tp


def expert_parts(info: ParameterInfo) -> int:
    """Return the degree of expert parallelism of a parameter; 1 if it is no expert's."""
    dim = info.layout.dim("ep")
    if dim is None or dim.placement != STAGE:
        return 1
    return dim.size


def held_states(snapshot: Snapshot) -> Iterator[StateInfo]:
    """Yield a rank's optimizer states, without those of parameters of which it holds no element.

    Such states tell nothing: torch creates them when a fresh optimizer is first saved, by a step.
    A parameter that has nothing but a step count keeps it.
    """
    owners: set[str] = set()
    owners_with_elements: set[str] = set()
    for state in snapshot.states:
        if state.key == "step":
            continue
        owners.add(state.owner)
        if state.numel:
            owners_with_elements.add(state.owner)
    empty_owners = owners - owners_with_elements
    for state in snapshot.states:
        if state.owner not in empty_owners:
            yield state


def differences(saved: Values, loaded: Values, when: str, *, states: bool = True) -> Iterator[str]:
    """Yield a finding for everything that is not equal bit by bit before and after a load.

    Args:
        saved: The values before.
        loaded: The values after.
        when: The words for the time of the second: "after the load".
        states: Whether to compare optimizer states and master weights too.
    """
    for text in loaded.wrong:
        yield f"{text} {when}"
    for text in saved.wrong:
        yield f"{text} before"
    kinds: list[Kind] = []
    state_kinds: list[Kind] = []
    for kind in saved.digests:
        if kind in {"parameter", "buffer"}:
            kinds.append(kind)
        elif states:
            kinds.append(kind)
            if kind != "master":
                state_kinds.append(kind)
    if state_kinds and not _has_any_of(loaded, state_kinds):
        yield f"the optimizer's state is empty {when}"
        kinds = [kind for kind in kinds if kind not in state_kinds]
    for kind in kinds:
        before = saved.of(kind)
        after = loaded.of(kind)
        if kind in saved.not_elementwise:
            # Each rank may keep another number for its own shard; which rank gets which one back is
            # not defined.
            unlike_names = _unlike_from_rank_to_rank(before)
            before = _without(before, unlike_names)
            after = _without(after, unlike_names)
        yield from compare(kind, before, after, when)


def _has_any_of(loaded: Values, kinds: Iterable[Kind]) -> bool:
    return any(loaded.of(kind) for kind in kinds)


def _unlike_from_rank_to_rank(digests_by_name: Digests) -> set[str]:
    """Return the names that have several digests, as ranks disagree."""
    names: set[str] = set()
    for name, digests in digests_by_name.items():
        if len(digests) > 1:
            names.add(name)
    return names


def _without(digests_by_name: Digests, names: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the digests of all but some names."""
    return {name: digests for name, digests in digests_by_name.items() if name not in names}


@dataclass(frozen=True)
class _DtypeChange:
    """The dtypes of a tensor before and after a load, as words.

    If its parts have several, the words are, for example, "bfloat16 and float32".
    """

    before: str
    after: str


def other_dtypes(saved: Values, loaded: Values, when: str, *, states: bool = True) -> Iterator[str]:
    """Yield a finding for each change of dtype, with all tensors that changed in the same way.

    The arguments are those of ``differences``.
    """
    for kind, dtypes_before in saved.dtypes.items():
        if not states and kind not in {"parameter", "buffer"}:
            continue
        dtypes_after = loaded.dtypes.get(kind, {})
        names_by_change: dict[_DtypeChange, list[str]] = defaultdict(list)
        for name in sorted(dtypes_before.keys() & dtypes_after.keys()):
            before = " and ".join(sorted(dtypes_before[name]))
            after = " and ".join(sorted(dtypes_after[name]))
            if not same_dtype(before, after):
                names_by_change[_DtypeChange(before, after)].append(name)
        for change, names in names_by_change.items():
            yield f"{kind} {and_others(names)}: {change.after} instead of {change.before} {when}"


def same_dtype(before: str, after: str) -> bool:
    """Tell whether the dtypes are the same. A saved Python number may come back as a tensor."""
    return before == after or "int" in {before, after} or "float" in {before, after}


def compare(kind: Kind, before: Digests, after: Digests, when: str) -> Iterator[str]:
    """Yield findings for one kind of values, each with all tensors that differ in the same way."""
    for title, names in _changes(kind, before, after).items():
        if names:
            yield f"{kind} {and_others(names)}: {title} {when}"


def _changes(kind: Kind, before: Digests, after: Digests) -> dict[str, set[str]]:
    """Return the names of the tensors that differ by how they differ, in the findings' order."""
    changes: dict[str, set[str]] = {
        "missing": set(before) - set(after),
        "new": set(after) - set(before),
        "unlike from rank to rank": set(),
        "unlike from rank to rank before, alike": set(),
        "other values": set(),
    }
    for name in before.keys() & after.keys():
        digests_before = before[name]
        digests = after[name]
        # Each rank may fill its own buffer (BatchNorm); then any rank's value may come back, or
        # each rank's own.
        if kind == "buffer" and set(digests) <= set(digests_before):
            continue
        if len(digests) > 1:
            changes["unlike from rank to rank"].add(name)
        # Parts that add up to no whole have no digest; ``Values.wrong`` reports them.
        elif not digests or not digests_before:
            continue
        elif len(digests_before) > 1:
            changes["unlike from rank to rank before, alike"].add(name)
        elif digests != digests_before:
            changes["other values"].add(name)
    return changes


def settings(saved: tuple[Snapshot, ...], loaded: tuple[Snapshot, ...], when: str) -> Iterator[str]:
    """Yield a finding for each number of a scheduler or param group that was not restored."""
    if not saved:
        return
    before = saved[0]
    for snapshot in loaded:
        rank = f"rank {snapshot.rank}"
        if snapshot.scheduler != before.scheduler:
            yield (
                f"{rank}: scheduler is at {snapshot.scheduler!r} {when}; "
                f"saved at {before.scheduler!r}"
            )
        groups_before = before.param_groups
        groups_after = snapshot.param_groups
        if len(groups_before) != len(groups_after):
            yield (
                f"{rank}: the optimizer has {len(groups_after)} param groups {when}; "
                f"{len(groups_before)} were saved"
            )
        for number in unlike(groups_before, groups_after):
            if number.before is not None and number.after is not None:
                setting = f"{number.key} of the optimizer's group {number.group}"
                yield f"{rank}: {setting} is {number.after} {when}; {number.before} was saved"


@dataclass(frozen=True)
class GroupNumber:
    """A number of a param group, such as its learning rate, before and after; None if missing."""

    group: int
    key: str
    before: float | None
    after: float | None


def unlike(
    groups_before: Sequence[Mapping[str, float]],
    groups_after: Sequence[Mapping[str, float]],
    tolerance: float = 0.0,
) -> Iterator[GroupNumber]:
    """Yield the numbers of param groups that differ by more than the relative tolerance."""
    for group, (numbers_before, numbers_after) in enumerate(
        zip(groups_before, groups_after, strict=False)
    ):
        for key in sorted(set(numbers_before) | set(numbers_after)):
            before = numbers_before.get(key)
            after = numbers_after.get(key)
            if (
                before is None
                or after is None
                or not math.isclose(before, after, rel_tol=tolerance)
            ):
                yield GroupNumber(group, key, before, after)


def flat_parameters(snapshots: tuple[Snapshot, ...]) -> bool:
    """Tell whether the live parameters are FSDP1's flat ones, which have no unwrapped names."""
    for snapshot in snapshots:
        if any(info.kind == "FlatParameter" for info in snapshot.parameters):
            return True
    return False


def unused(run: RunTrace) -> frozenset[str]:
    """Return the live names of the parameters that three steps do not update.

    They are those that are empty, and those without a gradient.

    BERT's pooler, for example, is trainable, an optimizer that steps holds it, but autograd never
    reaches it.
    """
    snapshots: list[Snapshot] = []
    for nth in range(3):
        for snapshot in run.at("step", nth):
            if snapshot.steps:
                snapshots.append(snapshot)
    return _always_empty(snapshots) | _without_gradient(run, snapshots)


def _always_empty(snapshots: Sequence[Snapshot]) -> frozenset[str]:
    """Return the live names of parameters that have no element on any rank."""
    empty: set[str] = set()
    not_empty: set[str] = set()
    for snapshot in snapshots:
        if snapshot.optimizer is None:
            continue
        for info in snapshot.parameters:
            # A shard of FSDP1 has only its own shape, which may be empty on one rank.
            if 0 in info.shape:
                empty.add(info.name)
            else:
                not_empty.add(info.name)
    return frozenset(empty - not_empty)


def _without_gradient(run: RunTrace, snapshots: Sequence[Snapshot]) -> frozenset[str]:
    """Return the live names of trainable parameters that never had a gradient on any rank."""
    stage_of_rank = stages_of(run)
    names_by_stage: dict[int, set[str]] = defaultdict(set)
    with_gradient: set[str] = set()
    for snapshot in snapshots:
        if snapshot.optimizer is None:
            continue
        names_on_rank = names_by_stage[stage_of_rank.get(snapshot.rank, 0)]
        for info in snapshot.parameters:
            # A rank that holds no element of it may have no gradient. DeepSpeed's optimizers hold
            # partitions (None).
            if info.held == 0 or not info.local_numel:
                continue
            names_on_rank.add(info.name)
            if info.name not in snapshot.optimizer.without_gradient or not info.trainable:
                with_gradient.add(info.name)
    without_gradient: set[str] = set()
    lost: set[str] = set()
    for names in names_by_stage.values():
        without_gradient |= names - with_gradient
        # If all of a model, or of a stage, have no gradient, gradients were lost: then these are
        # not unused.
        if names.isdisjoint(with_gradient):
            lost |= names
    return frozenset(without_gradient - lost)


def step_counts(source: RunTrace, run: RunTrace, when: str) -> Iterator[str]:
    """Yield a finding for each step count that differs one step after the resume.

    It is compared with that of the run that went on without one.
    """
    # A step count that several parameters share is counted up more than once a step.
    save = source.at("save")
    next_step: list[Snapshot] = []
    if save:
        for snapshot in source.at_index(save[0].index + 1):
            if snapshot.action == "step":
                next_step.append(snapshot)
    expected = values(source, tuple(next_step)).of("step")
    resumed = values(run, run.at("step")).of("step")
    if resumed:
        yield from compare("step", expected, resumed, f"one step {when}")


def adapter_name(name: str) -> str:
    """Return the name under which PEFT saves an adapter's parameter: without the adapter's name."""
    # Layers that are trained as a whole beside it (``modules_to_save``) are saved under the names
    # that they had before.
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def exported_weights(train: RunTrace, reload: RunTrace) -> Digests:
    """Return the digests that the export should hold.

    They are those of the master weights, or of their copies in a lower dtype where the export is in
    it.
    """
    # Each tensor's own dtype decides: trained weights may be exported in float32 beside frozen ones
    # in bfloat16.
    exported = train.at("export")
    trained = values(train, exported)
    copies = trained.of("parameter")
    masters = trained.of("master")
    # Flat masters where there are some are what is optimized, else the live parameters.
    weights = {**copies, **masters}
    models = []
    for snapshot in exported:
        if snapshot.model:
            models.append(snapshot.model)
    if not masters or reload.unwrapped is None or not models:
        return weights
    live_size = max(BYTES.get(info.dtype, 4) for info in models[0].parameters)
    if live_size >= BYTES["float32"]:
        return weights
    size_by_name = _exported_sizes(train, reload.unwrapped)
    for name in copies:
        if size_by_name.get(name, 4) <= live_size:
            weights[name] = copies[name]
    return weights


def _exported_sizes(train: RunTrace, reloaded: UnwrappedInfo) -> dict[str, int]:
    """Return in how many bytes an element of each parameter is exported."""
    # The dtype in the file, not the loaded one: PEFT widens what it loads.
    dtype_in_file: dict[str, str] = {}
    for snapshot in train.at("files", 1):
        for file in snapshot.files:
            dtype_in_file.update(file.dtypes)
    sizes: dict[str, int] = {}
    for info in reloaded.parameters:
        dtype = (
            dtype_in_file.get(info.name) or dtype_in_file.get(adapter_name(info.name)) or info.dtype
        )
        sizes[info.name] = BYTES.get(dtype, 4)
    return sizes


def rounding_of(cell: Cell, run: RunTrace) -> Precision:
    """Return the precision whose tolerances apply to training.

    Muon computes its update in bfloat16 even where the training is in float32.
    """
    if cell.option("optimizer") == "muon" and PRECISIONS.get(cell.precision).compute == "float32":
        return PRECISIONS.get("bf16_upcast")
    return precision_of_products(cell, run)


def precision_of_products(cell: Cell, run: RunTrace) -> Precision:
    """Return the precision whose tolerances apply to what a model computes.

    It is the cell's, or a lower one where float32 is multiplied in TF32.
    """
    precision = PRECISIONS.get(cell.precision)
    # TF32 has float16's 10 bits after the point. Under accelerate on an H100 losses were 2.7e-5
    # off, outputs 4.2e-4.
    if run.tf32 and precision.compute == "float32":
        return PRECISIONS.get("fp16_mixed")
    return precision


def in_tf32(run: RunTrace) -> str:
    """Return what a finding about numbers adds if the run multiplies float32 in TF32."""
    if run.tf32_since_build:
        return f"; {TF32_SINCE_BUILD}"
    if run.tf32:
        return "; products of float32 are in TF32"
    return ""
