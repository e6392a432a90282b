"""The collective that each rank of a hang waits in, or where else the rank is.

Both are read from its Python stack and its flight recorder. The stack is there whatever the rank
does. The recorder adds the group, the number and the tensors, if torch has one, if it could write
(a rank that holds the GIL in a thread cannot), and for collectives only: gloo records no send and
recv.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.launch.forensics.stacks import Frame, nearest, threads
from pytest_distcompat.wording import listed_ranks

_C10D = "/torch/distributed/distributed_c10d.py"
#: Of the functions there, those that send from one rank to another, and those that wait without a
#: record.
_P2P = re.compile(r"send|recv")
_UNRECORDED = re.compile(r"_group|subgroups|monitored_barrier")
#: Collectives whose tensors may differ between ranks.
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter")
#: How many collectives of a rank its section shows.
_COLLECTIVES_SHOWN = 5
#: How many tensors of a collective are shown.
_TENSORS_SHOWN = 3
#: How many different positions the headline names.
_DESCRIPTIONS_SHOWN = 4


@dataclass(frozen=True)
class Collective:
    """One collective as the flight recorder has it: the ``number``-th of its ``group``.

    ``key`` distinguishes groups of one name; ``tensors`` are the types and shapes of all its
    inputs; ``p2p``: a send or recv, which have numbers of their own.
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
    def counter(self) -> tuple[str, bool]:
        """Return what counts this collective: its group, which numbers sends and receives apart."""
        return self.key, self.p2p

    @property
    def signature(self) -> tuple[str, str]:
        """Return what all ranks of the group must agree on.

        It is the operation and, for most operations, the tensors.
        """
        if self.name.startswith(_UNEVEN):
            return self.name, ""
        return self.name, self.tensors

    @property
    def summary(self) -> str:
        """Return the collective with its tensors, and whether it is unfinished."""
        text = str(self)
        if self.tensors:
            text += f" of {self.tensors}"
        if not self.finished:
            text += ", unfinished"
        return text


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
        """Tell whether the rank waits for other ranks.

        A wait for a store does not count: the store's host need not be a rank.
        """
        # Under NCCL a GPU waits, and the stack shows the code that uses the result.
        if self.unfinished is not None and self.unfinished.backend == "nccl":
            return True
        return self.waits != "" and not self.connecting

    def description(self, *, plural: bool = False) -> str:
        """Return what follows "rank 0" or, with ``plural``, "ranks 0, 1"."""
        if self.waits:
            verb = "wait" if plural else "waits"
            return f"{verb} in {self._operation()} at {self.frame.where}"
        verb = "are" if plural else "is"
        position = f"{verb} in {self.frame.function} at {self.frame.where}"
        if self.frame.source:
            position += f": {self.frame.source}"
        if self.unfinished is not None:
            position += f", with {self.unfinished} unfinished"
        return position

    def _operation(self) -> str:
        """Return the function that the rank waits in, with the collective that it waits for."""
        collective = self.unfinished
        if collective is None:
            return self.waits
        if collective.name == self.waits:
            return str(collective)
        # The user called a function that is made of other collectives.
        return f"{self.waits} ({collective.name}, {collective.group}, #{collective.number})"

    def history(self) -> str:
        """Return the last collectives of this rank in one line; empty without a recorder."""
        if not self.recorded:
            return ""
        last = [collective.summary for collective in self.recorded[-_COLLECTIVES_SHOWN:]]
        summaries = "; ".join(last)
        return f"last collectives: {summaries}"


@dataclass(frozen=True)
class Mismatch:
    """Ranks of one group that called different collectives at the same place of its sequence.

    Attributes:
        number: The place in the group's sequence of collectives.
        collective_by_rank: What each rank called there.
    """

    number: int
    collective_by_rank: Mapping[int, Collective]

    @property
    def kind(self) -> str:
        """Return in two words what differs."""
        names = {collective.name for collective in self.collective_by_rank.values()}
        if len(names) == 1:
            return "different tensors"
        return "different collectives"

    def __str__(self) -> str:
        first = next(iter(self.collective_by_rank.values()))
        calls = []
        for rank, collective in self.collective_by_rank.items():
            tensors = collective.tensors or "nothing"
            calls.append(f"rank {rank} {collective.name} of {tensors}")
        listed = "; ".join(calls)
        return f"{self.kind} at #{self.number} of {first.group}: {listed}"


def read_wait_state(record: str, stack: str) -> WaitState | None:
    """Return where a rank was, from its flight record and its stack; None without a stack."""
    frames_by_thread = threads(stack)
    if not frames_by_thread:
        return None
    frames = _thread_of_the_user(frames_by_thread)
    recorded = tuple(read_record(record))
    waits = _called_function(frames)
    unfinished = _unfinished_collective(recorded, waits)
    if not waits and unfinished and frames[0].of_torch:
        # In backward(), or in the wait of FSDP2: torch is in the collective, whatever code called
        # it.
        waits = unfinished.name
    return WaitState(
        nearest(frames), waits, unfinished, recorded, connecting=frames[0].of_rendezvous
    )


def _thread_of_the_user(frames_by_thread: Sequence[Sequence[Frame]]) -> Sequence[Frame]:
    """Return the first stack with code of the user's own, the main thread's without one.

    A main thread without any of it waits for other threads to end.
    """
    for frames in frames_by_thread:
        if any(frame.of_the_user for frame in frames):
            return frames
    return frames_by_thread[0]


def _called_function(frames: Sequence[Frame]) -> str:
    """Return the public function of torch.distributed that was called.

    It is the outermost one; empty if there is none.
    """
    called = ""
    for frame in frames:
        if frame.file.endswith(_C10D) and not frame.function.startswith("_"):
            called = frame.function
    return called


def _unfinished_collective(recorded: Iterable[Collective], waits: str) -> Collective | None:
    """Return the collective that a rank in the function ``waits`` began last and has not finished.

    Without a function, any unfinished collective counts; in a function, only one of its kind.
    """
    if _UNRECORDED.search(waits):
        return None
    waits_for_p2p = bool(_P2P.search(waits))
    unfinished = None
    for collective in recorded:
        if collective.finished:
            continue
        if not waits or collective.p2p == waits_for_p2p:
            unfinished = collective
    return unfinished


def read_record(record: str) -> Iterable[Collective]:
    """Return what a rank's recorders held, in order: a line of JSON for each recorder.

    A line that a dying rank left half written is passed over. Of a group that was destroyed and
    made again only the collectives after that are returned: their numbers begin anew.
    """
    entries: list[Mapping[str, Any]] = []
    for line in record.splitlines():
        try:
            entries += json.loads(line).get("entries", ())
        except ValueError:
            continue
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    collectives: list[Collective] = []
    last_numbers: dict[tuple[str, bool], int] = {}
    for entry in entries:
        collective = _collective(entry)
        if collective.number < last_numbers.get(collective.counter, 0):
            collectives = [
                earlier for earlier in collectives if earlier.counter != collective.counter
            ]
        last_numbers[collective.counter] = collective.number
        collectives.append(collective)
    return collectives


def _collective(entry: Mapping[str, Any]) -> Collective:
    """Return the collective of an entry as torch writes it.

    torch does so in torch/csrc/distributed/c10d/FlightRecorder.hpp. gloo leaves its state at
    ``scheduled`` and shows by ``retired`` that it is done.
    """
    group_name, description = entry["process_group"]
    if description in {"", "undefined"}:
        description = f"group {group_name}"
    backend, _, operation = str(entry["profiling_name"]).partition(":")
    p2p = bool(entry["is_p2p"])
    number = entry["p2p_seq_id"] if p2p else entry["collective_seq_id"]
    return Collective(
        name=operation,
        group=description,
        key=group_name,
        number=int(number),
        tensors=_describe_tensors(entry["input_dtypes"], entry["input_sizes"]),
        finished=bool(entry["retired"]) or entry["state"] == "completed",
        p2p=p2p,
        backend=backend,
    )


def _describe_tensors(dtypes: Iterable[str], shapes: Iterable[object]) -> str:
    """Return types and shapes of tensors as text: ``Float[3,4]``.

    Of many tensors they are those of the first three, and how many more there are.
    """
    tensors = []
    for dtype, shape in zip(dtypes, shapes, strict=False):
        tensors.append(f"{dtype}{shape}".replace(" ", ""))
    text = ", ".join(tensors[:_TENSORS_SHOWN])
    if len(tensors) > _TENSORS_SHOWN:
        text += f" and {len(tensors) - _TENSORS_SHOWN} more"
    return text


def describe_wait_states(wait_states: Mapping[int, WaitState | None]) -> str:
    """Return one line that says which ranks are where.

    Ranks at the same place are named together.
    """
    if not any(wait_states.values()):
        return f"{listed_ranks(list(wait_states))} still running"
    ranks_by_description: dict[str, list[int]] = {}
    for rank, state in wait_states.items():
        description = state.description() if state else ""
        ranks_by_description.setdefault(description, []).append(rank)
    groups = list(ranks_by_description.values())
    parts = []
    for ranks in groups[:_DESCRIPTIONS_SHOWN]:
        state = wait_states[ranks[0]]
        description = state.description(plural=len(ranks) > 1) if state else "gave no stack"
        parts.append(f"{listed_ranks(ranks)} {description}")
    elsewhere: list[int] = []
    for ranks in groups[_DESCRIPTIONS_SHOWN:]:
        elsewhere += ranks
    if elsewhere:
        parts.append(f"{listed_ranks(elsewhere)} elsewhere")
    return "; ".join(parts)


def first_mismatch(wait_states: Mapping[int, WaitState | None]) -> Mismatch | None:
    """Return the first collective in which ranks of a group disagree; None if there is none."""
    calls: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, state in wait_states.items():
        recorded = state.recorded if state else ()
        for collective in recorded:
            if not collective.p2p:
                calls.setdefault((collective.key, collective.number), {})[rank] = collective
    for (_, number), collective_by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        signatures = {collective.signature for collective in collective_by_rank.values()}
        if len(signatures) > 1:
            return Mismatch(number, collective_by_rank)
    return None
