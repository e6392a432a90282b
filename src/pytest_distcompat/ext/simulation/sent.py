"""Compute how many bytes a rank sends in a step, for the report of a simulation.

With real ranks the clock says what communication costs; a simulation has no clock. The report of a
suite gets a table for each cell (``fsdp2-bf16-w1024``): the entry point ``SENT`` adds it. The input
is the trace of the run: what the probe recorded on rank 0, and so the collectives of its step.
``sent_bytes`` returns, for example, ``[{"collective": "all_gather", "mesh": "dp_shard", "ranks":
1024, "calls": 12, "bytes": 48103424}]``. *Mesh* is torch's DeviceMesh, whose dimensions have names.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.cost import nbytes
from pytest_distcompat.report.result import AddedEvidence, Row
from pytest_distcompat.trace import MeshDim, RunTrace, Snapshot

#: Kinds of collectives, by how the names of their operators begin. The value says how much a rank
#: of n sends if the ranks form a ring, as a multiple of its input.
_KINDS: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


@dataclass(frozen=True)
class _Traffic:
    """What collectives that are counted together have in common."""

    #: The kind: ``all_gather``.
    collective: str
    #: The dimensions of the mesh along which they run: ``dp_shard``, or ``dp_shard x tp``.
    mesh: str
    #: The number of ranks in the group.
    ranks: int


def sent_bytes(run: RunTrace) -> list[dict[str, Any]]:
    """Return what rank 0 sends in the recorded step of a simulation, in a ring.

    There is a row for each kind of collective, dimension of the mesh and size of the group, as in
    the module's docstring. There is none if the ranks were real, or took no step.
    """
    # Tensors of a simulation have no values: those of real ranks have.
    if run.has_values or not run.trained:
        return []
    # The snapshot of the step by the one process of a simulation, which is rank 0.
    snapshot = run.trained[0]
    dims = _largest_mesh(snapshot)
    calls = Counter[_Traffic]()
    sent = Counter[_Traffic]()
    for info in snapshot.collectives:
        if not info.ranks:
            # An operator without ranks, such as ``wait_tensor``, sends nothing.
            continue
        collective = _collective_kind(info.op)
        traffic = _Traffic(collective, _along(dims, info.ranks), len(info.ranks))
        # An operator of an unknown kind sends its input once.
        part_sent = 1.0
        if collective in _KINDS:
            part_sent = _KINDS[collective](len(info.ranks))
        calls[traffic] += info.calls
        # ``total`` is the number of elements of all these calls together.
        sent[traffic] += round(nbytes(info.total, info.dtype) * part_sent)
    rows: list[dict[str, Any]] = []
    for traffic in calls:
        rows.append(
            {**dataclasses.asdict(traffic), "calls": calls[traffic], "bytes": sent[traffic]}
        )
    return rows


def _largest_mesh(snapshot: Snapshot) -> tuple[MeshDim, ...]:
    """Return the dimensions of the largest mesh on which a parameter lies.

    It is the mesh with the most dimensions; there are none where no parameter lies on a mesh.
    """
    largest: tuple[MeshDim, ...] = ()
    for info in snapshot.parameters:
        if len(info.layout.dims) > len(largest):
            largest = info.layout.dims
    return largest


def _collective_kind(op: str) -> str:
    """Return the kind of a collective by its operator (``allgather_base_`` is ``all_gather``).

    An unknown operator is a kind of its own.
    """
    for kind in _KINDS:
        if op.replace("_", "").startswith(kind.replace("_", "")):
            return kind
    return op


def _along(dims: Sequence[MeshDim], ranks: tuple[int, ...]) -> str:
    """Return the names of the mesh dimensions along which these ranks differ, outermost first.

    Args:
        dims: The dimensions of the mesh, outermost first.
        ranks: The ranks of a group.
    """
    names: list[str] = []
    # Ranks are numbered along the innermost dimension first: the remainder is a rank's place along
    # it, the quotient its place along the others.
    for dim in reversed(dims):
        coordinates = {rank % dim.size for rank in ranks}
        if len(coordinates) > 1:
            names.insert(0, dim.name)
        ranks = tuple(rank // dim.size for rank in ranks)
    return " x ".join(names)


def add_sent(row: Row, run: RunTrace) -> None:
    """Add what a rank sends to the row of a cell."""
    row.sent = sent_bytes(run)


SENT = AddedEvidence("sent", add_sent)
