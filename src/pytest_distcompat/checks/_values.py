"""Values of a trainer, put together from all its ranks under the unwrapped model's names, and their comparison.

Digests of parts add up to that of the tensor, so values of 2 ranks compare with those of 4, another strategy or another mesh.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import and_others, named_ranks
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

#: State keys that hold the factors of a moment: torch's Adafactor, then transformers'.
#: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html
FACTORS = frozenset({"row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col"})

#: A library turned TF32 on; the user, who sets it before, did not.
TF32_SINCE_BUILD = "products of float32 are in TF32 since build"

#: A kind of value: ``parameter``, ``buffer``, ``master``, or a key of optimizer state such as ``exp_avg`` or ``step``.
Kind = str


@dataclass(frozen=True)
class Values:
    """Digests of whole tensors, by kind and unwrapped name: several where ranks that each hold the whole disagree.

    ``wrong`` are findings about tensors whose parts do not add up to the whole. ``dtypes`` are those that they are
    stored in.
    """

    digests: Mapping[Kind, Mapping[str, tuple[str, ...]]]
    wrong: tuple[str, ...] = ()
    not_elementwise: frozenset[Kind] = frozenset()
    dtypes: Mapping[Kind, Mapping[str, frozenset[str]]] = field(default_factory=dict)

    def of(self, kind: Kind) -> Mapping[str, tuple[str, ...]]:
        """Return the digests of one kind by unwrapped name."""
        return self.digests.get(kind, {})


@dataclass(frozen=True)
class _Part:
    """One rank's part of a tensor, and how many elements it has."""

    rank: int
    info: ParameterInfo | StateInfo
    numel: int


class Names:
    """Map from live names of a run to those of the unwrapped model, one for tied names, with their sizes."""

    def __init__(self, run: RunTrace, unwrapped: UnwrappedInfo) -> None:
        self.cell = Cell.parse(run.cell)
        self.strategy = STRATEGIES.get(self.cell.strategy)
        self.tied_to = {name: group[0] for group in unwrapped.tied for name in group}
        self.sizes = {info.name: math.prod(info.shape) for info in (*unwrapped.parameters, *unwrapped.buffers)}
        self.persistent = {info.name for info in unwrapped.buffers if info.persistent}
        self.known = {*self.sizes, *unwrapped.state_dict}
        self._found: dict[str, str] = {}

    def __call__(self, live: str) -> str:
        # Stored: each rank and each key of its state has the same names.
        if live not in self._found:
            name = self.strategy.canonical(live, self.cell, self.known)
            self._found[live] = self.tied_to.get(name, name)
        return self._found[live]


def values(run: RunTrace, snapshots: tuple[Snapshot, ...]) -> Values:
    """Return what all ranks together hold at these snapshots of that run."""
    if run.unwrapped is None:
        return Values({}, ("the unwrapped model was not recorded",))
    names = Names(run, run.unwrapped)
    parts: dict[tuple[Kind, str], list[_Part]] = defaultdict(list)
    for snapshot in snapshots:
        for kind, name, info, numel in _held(snapshot, names):
            parts[kind, name].append(_Part(snapshot.rank, info, numel))
    digests: dict[Kind, dict[str, tuple[str, ...]]] = defaultdict(dict)
    dtypes: dict[Kind, dict[str, frozenset[str]]] = defaultdict(dict)
    wrong, not_elementwise = [], not_elementwise_kinds(snapshots)
    for (kind, name), held in parts.items():
        dtypes[kind][name] = frozenset(part.info.dtype for part in held)
    for (kind, name), held in sorted(parts.items()):
        if kind in not_elementwise or kind == "step":
            # Of step counts there is one for each parameter, or for each flat partition of a rank.
            digests[kind][name] = tuple(sorted({part.info.digest for part in held}))
            continue
        groups, live = (
            shard_groups({part.rank: part.info.layout.holders for part in some})
            for some in (held, parts.get(("parameter", name), ()))
        )
        if any(len(group) > 1 and group in live for group in groups):
            # Each copy of the parameter has this state, or should have it.
            groups = tuple(sorted({*groups, *live}))
        wholes = [_whole(held, ranks, names.sizes.get(name), run.world_size) for ranks in groups]
        wrong += [f"{kind} {name!r}: {problem}" for _, problem in wholes if problem]
        digests[kind][name] = tuple(sorted({whole for whole, _ in wholes if whole}))
    return Values(digests, tuple(wrong), not_elementwise, dtypes)


def not_elementwise_kinds(snapshots: tuple[Snapshot, ...]) -> frozenset[Kind]:
    """Return the kinds of state that never have as many elements as the rank holds of the parameter."""
    # Such state is one number (NAdam's ``mu_product``), or a factor of a moment (Adafactor). Parameters of one element
    # are passed over: for them the sizes always agree.
    states: set[Kind] = set()
    by_element: set[Kind] = set()
    for snapshot in snapshots:
        sizes = {info.name: info.local_numel for info in snapshot.parameters if info.local_numel > 1}
        for state in snapshot.states:
            if state.key != "step" and state.numel and state.owner in sizes:
                states.add(state.key)
                by_element |= {state.key} if state.numel == sizes[state.owner] else set()
    return (frozenset(states) - by_element) | FACTORS


def _held(snapshot: Snapshot, names: Names) -> Iterator[tuple[Kind, str, ParameterInfo | StateInfo, int]]:
    """Yield (kind, unwrapped name, info, numel) of what a rank holds; of flat partitions only step counts."""
    for info in snapshot.parameters:
        yield "parameter", names(info.name), info, info.local_numel
    for info in snapshot.buffers:
        if names(info.name) in names.persistent:
            yield "buffer", names(info.name), info, info.local_numel
    for state in (*held_states(snapshot), *snapshot.masters):
        if not state.owner.startswith("partition "):
            yield state.key, names(state.owner), state, state.numel
        elif state.key == "step":
            yield "step", "partitions", state, state.numel


def stages_of(run: RunTrace) -> Mapping[int, int]:
    """Return which stage of a pipeline each rank holds, by its place along the mesh dimension ``pp``; empty for whole models."""
    built = ((one.rank, one.model.pp_ranks) for one in run.at("build") if one.model)
    return {rank: ranks.index(rank) for rank, ranks in built if ranks}


def by_stage(
    run: RunTrace, snapshots: tuple[Snapshot, ...]
) -> Iterator[tuple[tuple[Snapshot, ...], UnwrappedInfo | None]]:
    """Yield the snapshots of the ranks of each stage, with what these hold of the unwrapped model; once all, if that is all."""
    stages, unwrapped = stages_of(run), run.unwrapped
    if not stages or unwrapped is None:
        yield snapshots, unwrapped
        return
    names = Names(run, unwrapped)
    for stage in sorted({*stages.values()}):
        built = [one for one in run.at("build") if stages.get(one.rank) == stage]
        held = {names(info.name) for one in built for info in (*one.parameters, *one.buffers)}
        part = replace(
            unwrapped,
            parameters=tuple(info for info in unwrapped.parameters if names(info.name) in held),
            buffers=tuple(info for info in unwrapped.buffers if names(info.name) in held),
            blocks=tuple(one for one in unwrapped.blocks if any(name.startswith(f"{one}.") for name in held)),
        )
        yield tuple(one for one in snapshots if stages.get(one.rank) == stage), part


def across_stages(run: RunTrace, groups: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each copy of a model, from the groups that hold one of a stage together."""
    pipelines = {one.rank: one.model.pp_ranks for one in run.at("build") if one.model}
    copies = ({*group}.union(*(pipelines.get(rank, ()) for rank in group)) for group in groups)
    return tuple(sorted({tuple(sorted(ranks)) for ranks in copies}))


def named_stage(run: RunTrace, ranks: Sequence[int]) -> str:
    """Return the words for some ranks in a finding, and which stage of a pipeline they hold if they hold one."""
    of_rank, words = stages_of(run), named_ranks(ranks, run.world_size)
    stages = {of_rank[rank] for rank in ranks if rank in of_rank}
    return f"{words} (stage {stages.pop()})" if len(stages) == 1 else words


def cut_along(info: ParameterInfo, name: str) -> bool:
    """Tell whether the parameter is cut along the mesh dimension of that name."""
    dim = info.layout.dim(name)
    return dim is not None and dim.placement not in {REPLICATE, "Partial"}


def tp_copies(info: ParameterInfo, cell: Cell, rank: int) -> int:
    """Return how many ranks of tensor parallelism hold the same of a parameter: 1 if they hold one copy of it together.

    They do so of what tensor parallelism cuts, and of experts that are spread over them. ``rank`` is that of the info.
    """
    return 1 if {*cell.tp_peers(rank)} <= {*info.layout.holders} else cell.tp


def expert_parts(info: ParameterInfo) -> int:
    """Return in how many parts experts are spread of which the parameter's is one; 1 for any other parameter."""
    dim = info.layout.dim("ep")
    return dim.size if dim is not None and dim.placement == STAGE else 1


def held_states(snapshot: Snapshot) -> Iterator[StateInfo]:
    """Yield a rank's optimizer states, without those of parameters of which it holds no element."""
    # Those say nothing: torch creates them at the first save, by a step of a fresh optimizer.
    empty: dict[str, bool] = {}
    for state in snapshot.states:
        if state.key != "step":
            empty[state.owner] = empty.get(state.owner, True) and not state.numel
    return (state for state in snapshot.states if not empty.get(state.owner))


def _whole(parts: list[_Part], ranks: tuple[int, ...], numel: int | None, world_size: int) -> tuple[str, str]:
    """Return the digest of the whole tensor that these ranks hold together, and what is wrong with its parts; or empty texts."""
    held = sorted((part for part in parts if part.rank in ranks), key=lambda part: ranks.index(part.rank))
    elements, digests = sum(part.numel for part in held), [part.info.digest for part in held]
    if numel is None:
        return digests[0] if held else "", "is no name of the unwrapped model"
    if elements != numel:
        return "", f"the parts of {named_ranks(ranks, world_size)} are {elements} elements; expected {numel}"
    return (concatenate if any(part.info.layout.flat for part in held) else combine)(digests), ""


def differences(saved: Values, loaded: Values, when: str, *, states: bool = True) -> Iterator[str]:
    """Yield a finding for everything that is not equal bit by bit after the load, or whatever ``when`` says.

    Without ``states`` only parameters and buffers are compared.
    """
    yield from (f"{text} {when}" for text in loaded.wrong)
    yield from (f"{text} before" for text in saved.wrong)
    kinds = [kind for kind in saved.digests if states or kind in {"parameter", "buffer"}]
    state_kinds = [kind for kind in kinds if kind not in {"parameter", "buffer", "master"}]
    if state_kinds and not any(loaded.of(kind) for kind in state_kinds):
        yield f"the optimizer's state is empty {when}"
        kinds = [kind for kind in kinds if kind not in state_kinds]
    for kind in kinds:
        was, now = saved.of(kind), loaded.of(kind)
        if kind in saved.not_elementwise:
            # Each rank may keep another number for its own shard; which rank gets which one back is not defined.
            apart = {name for name, digests in was.items() if len(digests) > 1}
            was, now = ({name: one[name] for name in one.keys() - apart} for one in (was, now))
        yield from compare(kind, was, now, when)


def other_dtypes(saved: Values, loaded: Values, when: str, *, states: bool = True) -> Iterator[str]:
    """Yield a finding for each change of dtype; names that changed alike share one. Arguments as of ``differences``."""
    for kind, was in saved.dtypes.items():
        if not states and kind not in {"parameter", "buffer"}:
            continue
        now = loaded.dtypes.get(kind, {})
        changed: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in sorted(was.keys() & now.keys()):
            old, new = " and ".join(sorted(was[name])), " and ".join(sorted(now[name]))
            if not same_dtype(old, new):
                changed[old, new].append(name)
        yield from (
            f"{kind} {and_others(names)}: {new} instead of {old} {when}" for (old, new), names in changed.items()
        )


def same_dtype(was: str, now: str) -> bool:
    """Tell whether the dtypes are the same; a Python number, which has none, may come back as a tensor."""
    return was == now or "int" in {was, now} or "float" in {was, now}


def compare(
    kind: Kind, was: Mapping[str, tuple[str, ...]], now: Mapping[str, tuple[str, ...]], when: str
) -> Iterator[str]:
    """Yield findings for one kind of values, before and now; names that differ alike share one."""
    both = set(was) & set(now)
    if kind == "buffer":
        # Each rank may fill its own (BatchNorm); then any rank's value may come back, or each rank's own.
        both = {name for name in both if not set(now[name]) <= set(was[name])}
    for title, names in (
        ("missing", set(was) - set(now)),
        ("new", set(now) - set(was)),
        ("unlike from rank to rank", {name for name in both if len(now[name]) > 1}),
        # Parts that add up to no whole have no digest; ``Values.wrong`` reports them.
        ("unlike from rank to rank before, alike", {name for name in both if len(now[name]) == 1 < len(was[name])}),
        ("other values", {name for name in both if len(now[name]) == len(was[name]) == 1 and was[name] != now[name]}),
    ):
        if names:
            yield f"{kind} {and_others(names)}: {title} {when}"


def settings(saved: tuple[Snapshot, ...], loaded: tuple[Snapshot, ...], when: str) -> Iterator[str]:
    """Yield a finding for each number of a param group, and each scheduler state, that is not what was saved."""
    for snapshot in loaded if saved else ():
        where, before = f"rank {snapshot.rank}", saved[0]
        if snapshot.scheduler != before.scheduler:
            yield f"{where}: scheduler is at {snapshot.scheduler!r} {when}; saved at {before.scheduler!r}"
        was, now = before.param_groups, snapshot.param_groups
        if len(was) != len(now):
            yield f"{where}: the optimizer has {len(now)} param groups {when}; {len(was)} were saved"
        for number, key, old, new in unlike(was, now):
            if old is not None and new is not None:
                yield f"{where}: {key} of the optimizer's group {number} is {new} {when}; {old} was saved"


def unlike(
    was: tuple[Mapping[str, float], ...], now: tuple[Mapping[str, float], ...], tolerance: float = 0.0
) -> Iterator[tuple[int, str, float | None, float | None]]:
    """Yield the numbers of param groups that differ by more than the relative tolerance: (group, name, before, now)."""
    for number, (old, new) in enumerate(zip(was, now, strict=False)):
        for key in sorted(set(old) | set(new)):
            before, after = old.get(key), new.get(key)
            if before is None or after is None or not math.isclose(before, after, rel_tol=tolerance):
                yield number, key, before, after


def flat_parameters(snapshots: tuple[Snapshot, ...]) -> bool:
    """Tell whether the live parameters are FSDP1's flat ones, which have no unwrapped names."""
    return any(info.kind == "FlatParameter" for snapshot in snapshots for info in snapshot.parameters)


def unused(run: RunTrace) -> frozenset[str]:
    """Return the live names of parameters that nothing updates: empty ones, and those that autograd never reached."""
    # As BERT's pooler in three steps: they are trainable, an optimizer that steps holds them, and no rank has a gradient. If
    # all of a model, or of a stage, are so, gradients were lost: then it is of none.
    gradients: dict[str, set[bool]] = defaultdict(set)
    stages, of_stage = stages_of(run), defaultdict[int, set[str]](set)
    empty, held = set[str](), set[str]()
    for snapshot in (one for nth in range(3) for one in run.at("step", nth)):
        without = set(snapshot.optimizer.without_gradient) if snapshot.optimizer else set[str]()
        for info in snapshot.parameters if snapshot.steps and snapshot.optimizer else ():
            # A shard of FSDP1 has only its own shape, which may be empty on one rank.
            (empty if 0 in info.shape else held).add(info.name)
            # A rank that holds no element of it may have no gradient either. DeepSpeed's optimizers hold partitions (None).
            if info.held != 0 and info.local_numel:
                of_stage[stages.get(snapshot.rank, 0)].add(info.name)
                gradients[info.name].add(info.name not in without or not info.trainable)
    found = {name for name, had in gradients.items() if had == {False}}
    return frozenset(empty - held) | frozenset(found.difference(*(all_ for all_ in of_stage.values() if all_ <= found)))


def step_counts(source: RunTrace, run: RunTrace, when: str) -> Iterator[str]:
    """Yield a finding for each step count that, one step later, is not that of the run that never stopped."""
    # A step count that several parameters share is counted up more than once a step.
    save = source.at("save")
    later = [one for one in source.snapshots if save and one.action == "step" and one.index == save[0].index + 1]
    expected, found = values(source, tuple(later)), values(run, run.at("step"))
    if found.of("step"):
        yield from compare("step", expected.of("step"), found.of("step"), f"one step {when}")


def adapter_name(name: str) -> str:
    """Return the name under which PEFT saves a parameter of an adapter; loading puts the adapter's name back in."""
    # Layers that are trained as a whole beside it (``modules_to_save``) are saved under the names that they had before.
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def exported_weights(train: RunTrace, reload: RunTrace) -> Mapping[str, tuple[str, ...]]:
    """Return the values that the export should hold: masters, or the copies in a lower dtype where it has that dtype."""
    # Each tensor's own dtype decides: trained weights may be exported in float32 beside frozen ones in bfloat16.
    trained = values(train, train.at("export"))
    copies, masters = trained.of("parameter"), trained.of("master")
    # Flat masters where there are some are what is optimized, else the live parameters.
    weights = {**copies, **masters}
    model = next((snapshot.model for snapshot in train.at("export") if snapshot.model), None)
    if not masters or reload.unwrapped is None or model is None:
        return weights
    live = max(BYTES.get(info.dtype, 4) for info in model.parameters)
    # The dtype in the file, not the loaded one: PEFT widens what it loads.
    files = (file for snapshot in train.at("files", 1) for file in snapshot.files)
    written = {key: dtype for file in files for key, dtype in file.dtypes.items()}
    sizes = {
        info.name: BYTES.get(written.get(info.name) or written.get(adapter_name(info.name)) or info.dtype, 4)
        for info in reload.unwrapped.parameters
    }
    low = {name for name in copies if sizes.get(name, 4) <= live < BYTES["float32"]}
    return {name: copies[name] if name in low else weight for name, weight in weights.items()}


def rounding_of(cell: Cell, run: RunTrace) -> Precision:
    """Return the precision whose tolerances hold for a training: Muon computes its update in bfloat16 in float32 too."""
    if cell.option("optimizer") == "muon" and PRECISIONS.get(cell.precision).compute == "float32":
        return PRECISIONS.get("bf16_upcast")
    return precision_of_products(cell, run)


def precision_of_products(cell: Cell, run: RunTrace) -> Precision:
    """Return the precision whose tolerances hold for what a model computes: the cell's, or a lower one where it has TF32."""
    own = PRECISIONS.get(cell.precision)
    # TF32 has float16's 10 bits after the point. Under accelerate on an H100 losses were 2.7e-5 off, outputs 4.2e-4.
    return PRECISIONS.get("fp16_mixed") if run.tf32 and own.compute == "float32" else own


def in_tf32(run: RunTrace) -> str:
    """Return what to add to a finding about numbers of a run that multiplies float32 in TF32; else nothing."""
    if run.tf32_since_build:
        return f"; {TF32_SINCE_BUILD}"
    return "; products of float32 are in TF32" if run.tf32 else ""
