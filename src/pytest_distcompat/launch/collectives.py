"""The collective that each rank of a hang waits in, or where else it is: from its Python stack and flight recorder.

The stack is there whatever the rank does. The recorder adds the group, the number and the tensors, if torch has one, if it
could write (a rank that holds the GIL in a thread cannot), and for collectives only: gloo records no send and recv.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.launch.stacks import Frame, nearest, threads

_C10D = "/torch/distributed/distributed_c10d.py"
#: Of the functions there, those that send from one rank to another, and those that wait without a record.
_P2P = re.compile(r"send|recv")
_UNRECORDED = re.compile(r"_group|subgroups|monitored_barrier")
#: Collectives whose tensors may differ between ranks.
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter")
#: How many collectives of a rank its section shows.
_COLLECTIVES_SHOWN = 5
#: How many different positions the headline names.
_DESCRIPTIONS_SHOWN = 4


@dataclass(frozen=True)
class Collective:
    """One collective as the flight recorder has it: the ``number``-th of its ``group``.

    ``key`` distinguishes groups of one name; ``tensors`` are the types and shapes of all its inputs; ``p2p``: a send or recv,
    which have numbers of their own.
    """

    name: str
    group: str
    key: str
    number: int
    tensors: str = ""
    finished: bool = True
    p2p: bool = False
    backend: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.group}, #{self.number})"

    @property
    def signature(self) -> tuple[str, str]:
        """Return what all ranks of the group must agree on: the operation and, for most, the tensors."""
        return self.name, "" if self.name.startswith(_UNEVEN) else self.tensors


@dataclass(frozen=True)
class WaitState:
    """Where a rank was at the time limit, and what it waited for.

    Attributes:
        frame: The innermost frame of the user's own code.
        waits: The function of torch.distributed that the rank is in, by name.
        unfinished: The collective that it waits for, or that it began and does not wait for.
        recorded: The collectives of each group, in order.
        connecting: Whether the rank connects to a store.
    """

    frame: Frame
    waits: str = ""
    unfinished: Collective | None = None
    recorded: tuple[Collective, ...] = ()
    connecting: bool = False

    @property
    def waiting(self) -> bool:
        """Tell whether the rank waits for others, and not for a store whose host need not be a rank."""
        # Under NCCL a GPU waits, and the stack shows the code that uses the result.
        on_gpu = self.unfinished is not None and self.unfinished.backend == "nccl"
        return on_gpu or (bool(self.waits) and not self.connecting)

    def description(self, *, plural: bool = False) -> str:
        """Return what follows "rank 0" or, with ``plural``, "ranks 0, 1"."""
        one = self.unfinished
        if self.waits:
            more = f" ({one.name}, {one.group}, #{one.number})" if one and one.name != self.waits else ""
            operation = str(one) if one and not more else f"{self.waits}{more}"
            return f"{'wait' if plural else 'waits'} in {operation} at {self.frame.where}"
        source = f": {self.frame.source}" if self.frame.source else ""
        position = f"{'are' if plural else 'is'} in {self.frame.function} at {self.frame.where}{source}"
        return f"{position}, with {one} unfinished" if one else position

    def history(self) -> str:
        """Return the last collectives of this rank in one line; empty without a recorder."""
        last = [
            " of ".join(filter(None, (str(one), one.tensors))) + ("" if one.finished else ", unfinished")
            for one in self.recorded[-_COLLECTIVES_SHOWN:]
        ]
        return f"last collectives: {'; '.join(last)}" if last else ""


def read_wait_state(record: str, stack: str) -> WaitState | None:
    """Return where a rank was, from its flight record and its stack; None without a stack."""
    found = threads(stack)
    if not found:
        return None
    # A main thread without any of the user's code waits for other threads to end.
    frames = next((frames for frames in found if any(frame.of_the_user for frame in frames)), found[0])
    recorded = tuple(read_record(record))
    # The outermost of torch's own functions is the one that was called.
    called = [frame.function for frame in frames if frame.file.endswith(_C10D) and not frame.function.startswith("_")]
    waits = called[-1] if called else ""
    begun = [one for one in recorded if not one.finished and (not waits or one.p2p == bool(_P2P.search(waits)))]
    unfinished = begun[-1] if begun and not _UNRECORDED.search(waits) else None
    if not waits and unfinished and frames[0].of_torch:
        # In backward(), or in the wait of FSDP2: torch is in the collective, whatever code called it.
        waits = unfinished.name
    return WaitState(nearest(frames), waits, unfinished, recorded, connecting=frames[0].of_rendezvous)


def read_record(record: str) -> Iterable[Collective]:
    """Return what a rank's recorders held, in order: a line of JSON for each recorder.

    A line that a dying rank left half written is passed over. Of a group that was destroyed and made again only the collectives
    after that are returned: their numbers begin anew.
    """
    entries: list[Mapping[str, Any]] = []
    for line in record.splitlines():
        try:
            entries += json.loads(line).get("entries", ())
        except ValueError:
            continue
    found: list[Collective] = []
    last: dict[tuple[str, bool], int] = {}
    for one in map(_collective, sorted(entries, key=lambda entry: int(entry["time_created_ns"]))):
        counter = one.key, one.p2p
        if one.number < last.get(counter, 0):
            found = [other for other in found if (other.key, other.p2p) != counter]
        last[counter] = one.number
        found.append(one)
    return found


def _collective(entry: Mapping[str, Any]) -> Collective:
    """Return the collective of an entry as torch writes it (torch/csrc/distributed/c10d/FlightRecorder.hpp).

    gloo leaves its state at ``scheduled`` and shows by ``retired`` that it is done.
    """
    name, description = entry["process_group"]
    known = description not in {"", "undefined"}
    tensors = [
        f"{kind}{size}".replace(" ", "")
        for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    ]
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    backend, _, operation = str(entry["profiling_name"]).partition(":")
    return Collective(
        operation,
        description if known else f"group {name}",
        name,
        int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]),
        ", ".join(tensors[:3]) + more,
        bool(entry["retired"]) or entry["state"] == "completed",
        bool(entry["is_p2p"]),
        backend,
    )


def describe_wait_states(wait_states: Mapping[int, WaitState | None]) -> str:
    """Return one line that says which ranks are where; ranks at the same place are named together."""
    if not any(wait_states.values()):
        return f"{_ranks(list(wait_states))} still running"
    ranks_by_description: dict[str, list[int]] = {}
    for rank, one in wait_states.items():
        ranks_by_description.setdefault(one.description() if one else "", []).append(rank)
    parts, groups = [], list(ranks_by_description.values())
    for ranks in groups[:_DESCRIPTIONS_SHOWN]:
        one = wait_states[ranks[0]]
        parts.append(f"{_ranks(ranks)} {one.description(plural=len(ranks) > 1) if one else 'gave no stack'}")
    if rest := [rank for ranks in groups[_DESCRIPTIONS_SHOWN:] for rank in ranks]:
        parts.append(f"{_ranks(rest)} elsewhere")
    return "; ".join(parts)


def first_mismatch(wait_states: Mapping[int, WaitState | None]) -> tuple[str, str]:
    """Return what differs in the first collective in which ranks disagree, in two words and in a line; empty if none."""
    by_number: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, one in wait_states.items():
        for collective in one.recorded if one else ():
            if not collective.p2p:
                by_number.setdefault((collective.key, collective.number), {})[rank] = collective
    for (_, number), of_ranks in sorted(by_number.items(), key=lambda item: item[0][1]):
        if len({collective.signature for collective in of_ranks.values()}) > 1:
            difference = "tensors" if len({collective.name for collective in of_ranks.values()}) == 1 else "collectives"
            group = next(iter(of_ranks.values())).group
            inputs = [f"rank {rank} {one.name} of {one.tensors or 'nothing'}" for rank, one in of_ranks.items()]
            return f"different {difference}", f"different {difference} at #{number} of {group}: {'; '.join(inputs)}"
    return "", ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
