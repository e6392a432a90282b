"""Facts of live parameters that several checks need: sharded, replicated, or never updated.

A live parameter is one of the model as the trainer has wrapped it, as a rank's probe recorded it
(``ParameterInfo``). Its layout says along which dimensions of the device mesh (a grid of ranks) it
is sharded: ``dp_shard=Shard(0), tp=Shard(1)``. A cell is the configuration of a run, such as
``fsdp2-fp32-w4-tp_2``. Checks call these functions to decide how many copies of a parameter ranks
should hold, and which parameters cannot have changed in training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pytest_distcompat.cell import Cell
from pytest_distcompat.model_values.stages import stages_of
from pytest_distcompat.trace import REPLICATE, STAGE, ParameterInfo, RunTrace, Snapshot


def trainable_names(parameters: Iterable[ParameterInfo]) -> set[str]:
    """Return the names of the parameters that are trained."""
    return {info.name for info in parameters if info.trainable}


def is_sharded_along(info: ParameterInfo, name: str) -> bool:
    """Tell whether the parameter is sharded along the mesh dimension of that name, ``tp`` say."""
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
    # The ranks that together hold the copy to which this rank's shard belongs.
    if peers.issubset(info.layout.holders):
        return 1
    return cell.tp


def expert_parts(info: ParameterInfo) -> int:
    """Return the degree of expert parallelism of a parameter; 1 if it is no expert's."""
    dim = info.layout.dim("ep")
    # Placed as a stage of a pipeline is: the rank alone holds the tensor, here its own experts.
    if dim is None or dim.placement != STAGE:
        return 1
    return dim.size


def flat_parameters(snapshots: tuple[Snapshot, ...]) -> bool:
    """Tell whether the live parameters are FSDP1's flat ones, which have no unwrapped names."""
    for snapshot in snapshots:
        if any(info.kind == "FlatParameter" for info in snapshot.parameters):
            return True
    return False


def unused(run: RunTrace) -> frozenset[str]:
    """Return the live names of the parameters that three steps do not update.

    They are those that are empty, and those without a gradient. BERT's pooler, for example, is
    trainable and in the optimizer, but autograd never reaches it.
    """
    snapshots: list[Snapshot] = []
    for nth in range(3):
        for snapshot in run.at("step", nth):
            # Without an optimizer step nothing is known of gradients.
            if snapshot.steps:
                snapshots.append(snapshot)
    return _always_empty(snapshots) | without_gradient(run, snapshots)


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


def without_gradient(run: RunTrace, snapshots: Sequence[Snapshot]) -> frozenset[str]:
    """Return the live names of trainable parameters without a gradient in some steps.

    Args:
        run: The run.
        snapshots: The snapshots of all ranks after these steps. A parameter that had a gradient on
            any rank, in any of the steps, is not meant.
    """
    # Rank -> its stage in a pipeline; empty without a pipeline.
    stage_of_rank = stages_of(run)
    names_by_stage: dict[int, set[str]] = defaultdict(set)
    with_gradient: set[str] = set()
    for snapshot in snapshots:
        if snapshot.optimizer is None:
            continue
        names_on_rank = names_by_stage[stage_of_rank.get(snapshot.rank, 0)]
        for info in snapshot.parameters:
            # A frozen parameter has no gradient by intent.
            if not info.trainable:
                continue
            # A parameter that is not in the optimizer (``held`` is 0) tells nothing, and a rank
            # with no element of it may have no gradient. DeepSpeed's optimizers have flat
            # partitions instead: there ``held`` is None.
            if info.held == 0 or not info.local_numel:
                continue
            names_on_rank.add(info.name)
            if info.name not in snapshot.optimizer.without_gradient:
                with_gradient.add(info.name)
    without: set[str] = set()
    lost: set[str] = set()
    for names in names_by_stage.values():
        without |= names - with_gradient
        # If all that is trained of a model, or of a stage, has no gradient, gradients were lost:
        # then these are not unused.
        if names.isdisjoint(with_gradient):
            lost |= names
    return frozenset(without - lost)
