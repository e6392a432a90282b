"""What a trainer holds, put together from all its ranks: values by the unwrapped model's names, whatever strategy splits them.

Digests of the flat shards, in the order of the ranks, compose to that of the whole (``digests``), so that what 2 ranks saved
can be compared with what 4 ranks loaded, or another strategy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import named_ranks
from pytest_distcompat.cost import BYTES
from pytest_distcompat.digests import combine
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import OptimizerInfo, RunTrace, Snapshot, StateInfo, UnwrappedInfo

#: Factors of a moment: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html, and those of transformers'.
FACTORS = frozenset({"row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col"})

#: What is compared, and the names that stand under it: ``parameter``, ``buffer``, ``master``, ``exp_avg``, ``step``.
Kind = str


@dataclass(frozen=True)
class Values:
    """Kind to unwrapped name to the digests of the whole tensor: one, or several where ranks that hold all of it disagree.

    ``wrong`` says of what the parts do not make up the whole; ``dtypes`` what each is stored in; ``beside`` are the kinds that
    have no element for each of the parameter's, see ``kept_beside``.
    """

    found: Mapping[Kind, Mapping[str, tuple[str, ...]]]
    wrong: tuple[str, ...] = ()
    beside: frozenset[Kind] = frozenset()
    dtypes: Mapping[Kind, Mapping[str, frozenset[str]]] = field(default_factory=dict)

    def of(self, kind: Kind) -> Mapping[str, tuple[str, ...]]:
        """The names and digests of one kind."""
        return self.found.get(kind, {})

    @property
    def weights(self) -> Mapping[str, tuple[str, ...]]:
        """What is optimized: flat masters where there are, else the live parameters."""
        return {**self.of("parameter"), **self.of("master")}


@dataclass(frozen=True)
class _Part:
    """What one rank holds of a tensor."""

    rank: int
    digest: str
    numel: int
    dtype: str


class _Names:
    """The unwrapped model's names for the live ones of a run, tied ones as one, and their sizes."""

    def __init__(self, run: RunTrace, unwrapped: UnwrappedInfo) -> None:
        self.cell = Cell.parse(run.cell)
        self.strategy = STRATEGIES.get(self.cell.strategy)
        self.one = {name: group[0] for group in unwrapped.tied for name in group}
        self.sizes = {info.name: math.prod(info.shape) for info in (*unwrapped.parameters, *unwrapped.buffers)}
        self.persistent = {info.name for info in unwrapped.buffers if info.placement == "persistent"}
        self.known = {*self.sizes, *unwrapped.state_dict}

    def __call__(self, live: str) -> str:
        name = self.strategy.canonical(live, self.cell, self.known)
        return self.one.get(name, name)

    def numel(self, name: str) -> int | None:
        return self.sizes.get(name)


def values(run: RunTrace, snapshots: tuple[Snapshot, ...]) -> Values:
    """What all ranks together hold at these snapshots of that run."""
    first = run.first("build_model") or run.first("reload")
    if first is None or first.unwrapped is None:
        return Values({}, ("the unwrapped model was not seen",))
    names = _Names(run, first.unwrapped)
    parts: dict[tuple[Kind, str], list[_Part]] = defaultdict(list)
    for snapshot in snapshots:
        for kind, name, digest, numel, dtype in _held(snapshot, names):
            parts[kind, name].append(_Part(snapshot.rank, digest, numel, dtype))
    found: dict[Kind, dict[str, tuple[str, ...]]] = defaultdict(dict)
    wrong, copies, beside = [], run.replicas, kept_beside(snapshots)
    for (kind, name), held in sorted(parts.items()):
        if kind in beside:
            found[kind][name] = tuple(sorted({part.digest for part in held}))
            continue
        size, wholes = 1 if kind == "step" else names.numel(name), set[str]()
        for ranks in copies:
            own = [part for part in held if part.rank in ranks]
            whole, problem = _whole(own, size, named_ranks(ranks, run.world_size))
            wholes |= set(whole)
            if problem:
                wrong.append(f"{kind} {name!r}: {problem}")
        found[kind][name] = tuple(sorted(wholes))
    dtypes: dict[Kind, dict[str, frozenset[str]]] = defaultdict(dict)
    for (kind, name), held in parts.items():
        dtypes[kind][name] = frozenset(part.dtype for part in held)
    return Values(found, tuple(wrong), beside, dtypes)


def kept_beside(snapshots: tuple[Snapshot, ...]) -> frozenset[Kind]:
    """The kinds of state of which no parameter's has as many elements as the rank holds of the parameter.

    A number that counts beside it (NAdam's ``mu_product``, ASGD's ``eta``), or a factor of a moment (Adafactor). What has one
    element itself tells nothing.
    """
    states: set[Kind] = set()
    by_element: set[Kind] = set()
    for snapshot in snapshots:
        if snapshot.model is None or snapshot.optimizer is None:
            continue
        sizes = {info.name: info.local_numel for info in snapshot.model.parameters if info.local_numel > 1}
        for state in snapshot.optimizer.states:
            if state.key != "step" and state.numel and state.owner in sizes:
                states.add(state.key)
                by_element |= {state.key} if state.numel == sizes[state.owner] else set()
    return (frozenset(states) - by_element) | FACTORS


def _held(snapshot: Snapshot, names: _Names) -> Iterator[tuple[Kind, str, str, int, str]]:
    """Everything on one rank, by unwrapped names. A flat partition has none but its count of steps."""
    if snapshot.model is not None:
        for info in snapshot.model.parameters:
            yield "parameter", names(info.name), info.digest, info.local_numel, info.dtype
        for info in snapshot.model.buffers:
            if names(info.name) in names.persistent:
                yield "buffer", names(info.name), info.digest, info.local_numel, info.dtype
    if snapshot.optimizer is not None:
        for state in (*held_states(snapshot.optimizer), *snapshot.optimizer.masters):
            if not state.owner.startswith("partition "):
                yield state.key, names(state.owner), state.digest, state.numel, state.dtype
            elif state.key == "step":
                yield "step", "partitions", state.digest, state.numel, state.dtype


def held_states(optimizer: OptimizerInfo) -> Iterator[StateInfo]:
    """A rank's states, those aside of parameters of which it holds no element.

    Such may be there or not, at any count of steps: torch makes them when it first saves
    (``torch.distributed.checkpoint.state_dict``, a step of a fresh optimizer).
    """
    empty: dict[str, bool] = {}
    for state in optimizer.states:
        if state.key != "step":
            empty[state.owner] = empty.get(state.owner, True) and not state.numel
    return (state for state in optimizer.states if not empty.get(state.owner))


def _whole(held: list[_Part], numel: int | None, who: str) -> tuple[tuple[str, ...], str]:
    """The digests of the whole, and what is wrong with its parts."""
    elements = sum(part.numel for part in held)
    if numel is None:
        return tuple(sorted({part.digest for part in held})), "is no name of the unwrapped model"
    if elements == numel:
        return (combine(part.digest for part in sorted(held, key=lambda part: part.rank)),), ""
    if held and all(part.numel == numel for part in held):
        return tuple(sorted({part.digest for part in held})), ""
    return (), f"the parts of {who} are {elements} elements; expected {numel}"


def differences(saved: Values, loaded: Values, when: str, *, states: bool = True) -> Iterator[str]:
    """What is not equal bit by bit; without ``states``, parameters and buffers only. ``when``: "after the load at 4 ranks"."""
    yield from (f"{text} {when}" for text in loaded.wrong)
    yield from (f"{text} before" for text in saved.wrong)
    kinds = [kind for kind in saved.found if states or kind in {"parameter", "buffer"}]
    snapshots = [kind for kind in kinds if kind not in {"parameter", "buffer", "master"}]
    if snapshots and not any(loaded.of(kind) for kind in snapshots):
        yield f"the optimizer's state is empty {when}"
        kinds = [kind for kind in kinds if kind not in snapshots]
    for kind in kinds:
        was, now = saved.of(kind), loaded.of(kind)
        if kind in saved.beside:
            # Of its own shard each rank may have kept another number: whose comes back to whom is not said.
            apart = {name for name, digests in was.items() if len(digests) > 1}
            was, now = ({name: one[name] for name in one.keys() - apart} for one in (was, now))
        yield from compare(kind, was, now, when)


def other_dtypes(saved: Values, loaded: Values, when: str, *, states: bool = True) -> Iterator[str]:
    """What is stored in another dtype than before, the names that changed alike as one finding; ``states`` as above."""
    for kind, was in saved.dtypes.items():
        if not states and kind not in {"parameter", "buffer"}:
            continue
        now = loaded.dtypes.get(kind, {})
        changed: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in sorted(was.keys() & now.keys()):
            old, new = " and ".join(sorted(was[name])), " and ".join(sorted(now[name]))
            if not same_dtype(old, new):
                changed[old, new].append(name)
        for (old, new), (first, *others) in changed.items():
            yield f"{kind} {first!r}{f' and {len(others)} others' if others else ''}: {new} instead of {old} {when}"


def same_dtype(was: str, now: str) -> bool:
    """Whether the dtypes are the same; a number may come back as a tensor, and has none."""
    return was == now or "int" in {was, now} or "float" in {was, now}


def compare(
    kind: Kind, was: Mapping[str, tuple[str, ...]], now: Mapping[str, tuple[str, ...]], when: str
) -> Iterator[str]:
    """One kind of values before and now, the names that differ alike as one finding."""
    both = set(was) & set(now)
    if kind == "buffer":
        # Each rank may fill its own (BatchNorm): then any rank's may come back, and to each rank its own.
        both = {name for name in both if not set(now[name]) <= set(was[name])}
    for title, names in (
        ("missing", set(was) - set(now)),
        ("new", set(now) - set(was)),
        ("unlike from rank to rank", {name for name in both if len(now[name]) > 1}),
        # Parts that make up no whole have no digest, and were told of.
        ("other values", {name for name in both if len(now[name]) == 1 and was[name] != now[name]}),
    ):
        if names:
            first, *others = sorted(names)
            yield f"{kind} {first!r}{f' and {len(others)} others' if others else ''}: {title} {when}"


def settings(saved: tuple[Snapshot, ...], loaded: tuple[Snapshot, ...], when: str) -> Iterator[str]:
    """The numbers of the optimizer's groups (learning rate, weight decay) and the scheduler: on each rank what was saved."""
    if not saved:
        return
    before = saved[0]
    for snapshot in loaded:
        where = f"rank {snapshot.rank}"
        if snapshot.scheduler != before.scheduler:
            yield f"{where}: scheduler is at {snapshot.scheduler!r} {when}; saved at {before.scheduler!r}"
        was, now = (one.optimizer.param_groups if one.optimizer else () for one in (before, snapshot))
        if len(was) != len(now):
            yield f"{where}: the optimizer has {len(now)} param groups {when}; {len(was)} were saved"
        for number, key, old, new in unlike(was, now):
            if old is not None and new is not None:
                yield f"{where}: {key} of the optimizer's group {number} is {new} {when}; {old} was saved"


def unlike(
    was: tuple[Mapping[str, float], ...], now: tuple[Mapping[str, float], ...], tolerance: float = 0.0
) -> Iterator[tuple[int, str, float | None, float | None]]:
    """The numbers of the optimizer's groups that are further apart: group, name, before and now; None where there is none."""
    for number, (old, new) in enumerate(zip(was, now, strict=False)):
        for key in sorted(set(old) | set(new)):
            before, after = old.get(key), new.get(key)
            if before is None or after is None or not math.isclose(before, after, rel_tol=tolerance):
                yield number, key, before, after


def flat_parameters(snapshots: tuple[Snapshot, ...]) -> bool:
    """Whether the live parameters are FSDP1's flat ones, which have no unwrapped names."""
    return any(
        info.kind == "FlatParameter" for snapshot in snapshots if snapshot.model for info in snapshot.model.parameters
    )


def counted(source: RunTrace, run: RunTrace, when: str) -> Iterator[str]:
    """One step later the optimizer counts what the run that never stopped counts: state may be shared and count twice."""
    save = source.at("save")
    later = [m for m in source.snapshots if save and m.action == "step" and m.index == save[0].index + 1]
    expected, found = values(source, tuple(later)), values(run, run.at("step"))
    if found.of("step"):
        yield from compare("step", expected.of("step"), found.of("step"), f"one step {when}")


def adapter_name(name: str) -> str:
    """A parameter of an adapter as PEFT saves it; the loader gives it the adapter's name anew."""
    return name.replace(".default.", ".")


def exported_weights(train: RunTrace, reload: RunTrace) -> Mapping[str, tuple[str, ...]]:
    """What the export stands for: the masters, or, of what was reloaded in a lower dtype, the copies in that dtype.

    By each tensor's own dtype: trained weights may be exported in float32 beside frozen ones in bfloat16.
    """
    trained = values(train, train.at("export"))
    loaded = reload.first("reload")
    model = next((snapshot.model for snapshot in train.at("export") if snapshot.model), None)
    if not trained.of("master") or loaded is None or loaded.unwrapped is None or model is None:
        return trained.weights
    live = max(BYTES.get(info.dtype, 4) for info in model.parameters)
    # The file's own dtype: PEFT widens what it loads.
    written = {
        key: dtype for snapshot in train.at("files", 1) for file in snapshot.files for key, dtype in file.dtypes.items()
    }
    told = {
        info.name: written.get(info.name) or written.get(adapter_name(info.name)) or info.dtype
        for info in loaded.unwrapped.parameters
    }
    sizes = {name: BYTES.get(dtype, 4) for name, dtype in told.items()}
    copies = trained.of("parameter")
    return {
        name: copies[name] if name in copies and sizes.get(name, 4) <= live < BYTES["float32"] else master
        for name, master in trained.weights.items()
    }
