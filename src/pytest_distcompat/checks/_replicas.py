"""Part of the check ``active``: do ranks that hold the same part of a tensor hold the same values?

After a step all replicas of a parameter, of optimizer state and of a gradient must be equal. They
are not if a rank skipped a step or trains on its own gradients.

``checks.active`` calls ``unlike_replicas`` with the snapshots of all ranks after 3 and after 20
steps. It yields findings, such as ``rank 1: 12 parameters differ from rank 0's after three steps,
first 'lm_head.weight'; replicas must stay equal``.

Values are compared by digests, hashes of what a rank holds, so no tensor is gathered. Ranks hold
the same part of a tensor if the regions of their layouts are equal: ``(("Shard(0)", 2, 1),)`` is
the second of two shards along dimension 0, and ``()`` is a whole tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_distcompat.checks._base import Snapshots
from pytest_distcompat.model_values import Names, held_states, stages_of
from pytest_distcompat.trace import RunTrace

#: The name of a tensor, and the region of it that a rank holds.
_Place = tuple[str, Hashable]
#: A rank, and the first rank that holds the same part of a tensor.
_RankAndPeer = tuple[int, int]


@dataclass(frozen=True)
class _HeldTensor:
    """A tensor, or a part of one, as one rank holds it.

    Attributes:
        rank: The rank.
        name: The tensor's name: ``lm_head.weight``, or ``exp_avg of lm_head.weight`` for optimizer
            state.
        region: Which part of the tensor it is. Tensors of equal name and region are replicas.
        value: What must be equal for replicas: a digest, or the sum of squares of a gradient.
    """

    rank: int
    name: str
    region: Hashable
    value: Hashable


@dataclass(frozen=True)
class _ReplicaDifference:
    """The tensors in which a rank differs from another one that holds replicas of them.

    Attributes:
        rank: The rank.
        peer: The first rank with the same part of these tensors.
        names: The names of the tensors.
    """

    rank: int
    peer: int
    names: Sequence[str]


def unlike_replicas(run: RunTrace, trained: Snapshots, when: str) -> Iterator[str]:
    """Yield a finding for each rank that differs from the first rank with the same tensors.

    Parameters are compared first, then optimizer state, then gradients. Only the first of these
    kinds that differs is reported.

    Args:
        run: The run.
        trained: The snapshots of all ranks after a step.
        when: The words for that step: ``three steps``.
    """
    # Rank -> its pipeline stage, a part of the layers that pipeline parallelism puts on some ranks.
    stages = stages_of(run)
    name_of: Callable[[str], str] = str
    if stages and run.unwrapped:
        # Tied parameters have different names on different stages. ``Names`` maps them to one name
        # in the unwrapped model.
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
            # The other kinds follow from it: gradients of unequal parameters are unequal.
            return


def _named_stages(stages: Mapping[int, int], difference: _ReplicaDifference) -> str:
    """Return the words about two pipeline stages that both have a tied parameter.

    The text is empty if the ranks are of one stage.
    """
    stage = stages.get(difference.rank)
    peer_stage = stages.get(difference.peer)
    if stage == peer_stage:
        return ""
    return f" (stages {peer_stage} and {stage} have them, and train them apart)"


def _replica_differences(tensors: Iterable[_HeldTensor]) -> list[_ReplicaDifference]:
    """Return which ranks hold other values than the first rank with the same tensors.

    They are sorted by the rank, then by the peer.
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
    """Yield each rank's parameters; ``name_of`` gives the name by which replicas are matched."""
    for snapshot in trained:
        for info in snapshot.parameters:
            name = name_of(info.name)
            yield _HeldTensor(snapshot.rank, name, info.layout.region, info.digest)


def _held_optimizer_states(
    trained: Snapshots, name_of: Callable[[str], str]
) -> Iterator[_HeldTensor]:
    """Yield each rank's tensors of optimizer state, and its parts of master weights.

    Master weights are the float32 copies of parameters that ZeRO's optimizer updates. It keeps them
    flattened, in partitions that mix several parameters.
    """
    for snapshot in trained:
        for state in (*held_states(snapshot), *snapshot.masters):
            # A flat partition has no parameter's name; ``masters`` are its parts, by parameter.
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
