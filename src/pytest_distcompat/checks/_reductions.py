"""Which collectives of a step sum gradients.

The checks ``active``, ``dtypes`` and ``accumulation`` ask whether, in which dtype and how often a
rank reduced gradients in a step. A rank's snapshot after the step has all collectives of the step,
by kind: operator (``allreduce``), dtype, numbers of calls and elements, and ranks. Some of them are
not of gradients: norms, metrics, flags, and activations. The cell, the configuration of the run
such as ``fsdp2-fp32-w4-tp_2``, says which ranks exchange activations.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_distcompat.cell import Cell
from pytest_distcompat.trace import CollectiveInfo, Snapshot

#: The names of c10d's operators, without the underscores around them, that can sum gradients.
REDUCTIONS = frozenset(
    {
        "all_reduce",
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_base",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)


def gradient_reductions(cell: Cell, snapshot: Snapshot) -> Iterator[CollectiveInfo]:
    """Yield the collectives of a rank's step that may sum gradients.

    They reduce tensors of more than one floating-point number; a norm or a flag is a single number.
    Collectives of activations are left out: those among ranks that hold parts of the same layers
    (tensor parallelism) or stages of one pipeline.
    """
    for info in snapshot.collectives:
        if info.op not in REDUCTIONS or "float" not in info.dtype:
            continue
        if info.numel > 1 and not _moves_activations(cell, snapshot.rank, info):
            yield info


def _moves_activations(cell: Cell, rank: int, info: CollectiveInfo) -> bool:
    """Tell whether a collective runs only among ranks of one tensor-parallel group or pipeline."""
    # Nobody knows the ranks of its process group: it counts as a collective of gradients.
    if not info.ranks:
        return False
    ranks = set(info.ranks)
    for peers in (cell.tp_peers(rank), cell.pp_peers(rank)):
        if len(peers) > 1 and ranks.issubset(peers):
            return True
    return False
