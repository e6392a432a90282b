"""Whole tensors of a run, put together from what each rank recorded of its part.

Each rank's snapshot has a digest (a hash) of its shard of each parameter and optimizer state.
``values`` combines the shards' digests into those of whole tensors, without gathering any tensor.
So a run on 2 ranks compares with one on 4, and FSDP2 with ZeRO-3.

Example: on 2 ranks FSDP2 shards ``lm_head.weight``, which its trainer calls
``module.lm_head.weight``. The result has ``of("parameter")["lm_head.weight"] == ("32:1f2e...",)``:
the name in the unwrapped model (before anything wrapped it), and one digest. Two digests would mean
that replicas of the tensor differ, as under DDP two ranks with different weights.

Which ranks hold a tensor together a snapshot says of each rank's part: ``layout.holders``. ZeRO
keeps state flattened, many parameters in one tensor: its owner is no parameter but ``partition 0``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_distcompat.cell import Cell
from pytest_distcompat.digests import combine, concatenate
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import (
    ParameterInfo,
    RunTrace,
    Snapshot,
    StateInfo,
    UnwrappedInfo,
    shard_groups,
)
from pytest_distcompat.wording import named_ranks

#: State keys that hold the factors of a moment: torch's Adafactor, then transformers'.
#: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html
FACTORS = frozenset({"row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col"})

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
        digests: Kind -> unwrapped name -> digests:
        ``{"exp_avg": {"lm_head.weight": ("32:1f2e",)}}``.
        wrong: Findings (sentences for the report) about tensors whose parts do not add up to the
            whole.
        not_elementwise: The kinds of state that do not have an element for each element of a
            parameter, ``row_var`` say. Their parts cannot be put together, so that their digests
            are those of all parts.
        dtypes: Kind -> unwrapped name -> the dtypes that the parts are stored in.
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

    ``names("module.lm_head.weight")`` is ``"lm_head.weight"``. Tied parameters, which are one
    parameter under several names, all get the name of the first of them.
    """

    def __init__(self, run: RunTrace, unwrapped: UnwrappedInfo) -> None:
        self.cell = Cell.parse(run.cell)
        self.strategy = STRATEGIES.get(self.cell.strategy)
        #: Each tied name -> the first name of its parameter.
        self.tied_to: dict[str, str] = {}
        for group in unwrapped.tied:
            self.tied_to.update(dict.fromkeys(group, group[0]))
        #: Unwrapped name of a parameter or buffer -> its number of elements.
        self.sizes: dict[str, int] = {}
        for info in (*unwrapped.parameters, *unwrapped.buffers):
            self.sizes[info.name] = math.prod(info.shape)
        #: The unwrapped names of the buffers that the state dict has.
        self.persistent: set[str] = set()
        for info in unwrapped.buffers:
            if info.persistent:
                self.persistent.add(info.name)
        #: All names of the unwrapped model.
        self.known = {*self.sizes, *unwrapped.state_dict}
        self._unwrapped_by_live_name: dict[str, str] = {}

    def __call__(self, live: str) -> str:
        # Stored, since it is asked for the same names again and again: for each rank, and for each
        # key of its optimizer state.
        if live not in self._unwrapped_by_live_name:
            # The strategy knows which segments its wrappers add to a name.
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
    """Return what all ranks together hold at these snapshots of that run.

    ``snapshots`` are those of all ranks after one action, such as ``run.at("save")``.
    """
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
        # One digest for each copy of the tensor: they are equal if replicas are.
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
    """Return the kinds of state that do not have one element for each element of the parameter.

    A kind is a key of the optimizer's state, such as ``mu_product``.
    """
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
    If only ranks 0 and 1 recorded state of it, there are two copies of the state too: the second
    one lacks all its elements, which is a finding.

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

    Shards of a mesh know their positions in the tensor, so their digests are combined in any order.
    Pieces of a flattened tensor (FSDP1, ZeRO) do not, so theirs are concatenated in rank order.

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
        # A name that the strategy could not map, for which nothing can be added up.
        digest = digests[0] if digests else ""
        return _WholeTensor(digest, "is no name of the unwrapped model")
    elements = sum(part.numel for part in group_parts)
    if elements != numel:
        words = f"the parts of {named_ranks(ranks, world_size)} are {elements} elements"
        return _WholeTensor(problem=f"{words}; expected {numel}")
    if any(part.info.layout.flat for part in group_parts):
        return _WholeTensor(concatenate(digests))
    return _WholeTensor(combine(digests))


def held_states(snapshot: Snapshot) -> Iterator[StateInfo]:
    """Yield a rank's optimizer states, without those of parameters of which it holds no element.

    Such states tell nothing: torch creates them when a fresh optimizer is first saved, by a step.
    A parameter that has nothing but a step count keeps it.
    """
    # The owner of a state is the live name of its parameter.
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
