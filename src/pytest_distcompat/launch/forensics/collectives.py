"""The collective that each rank of a hang waits in, or where else the rank is.

Before the watchdog kills the ranks of a run at its time limit, each rank writes two texts:

- its *stack*: the Python stacks of its threads, by ``faulthandler``. It is there whatever the rank
  does.
- its *record*: the last collectives, from torch's flight recorder, as JSON. It adds the group, the
  number and the tensors of a collective. It is missing if torch has no recorder, or if the rank
  cannot write (another thread holds the GIL). gloo records no send and recv.

``conclude`` calls ``read_wait_state`` with both texts of a rank. ``ending`` puts the results of all
ranks into the report, by ``describe_wait_states`` (``rank 0 waits in all_reduce (default_pg, #3) at
train.py:12; rank 1 is in step at train.py:40: time.sleep(60)``) and by ``first_mismatch``
(``different tensors at #3 of default_pg: rank 0 all_reduce of Float[4]; rank 1 all_reduce of
Float[5]``). The watchdog and ``ext/inside`` use ``read_wait_state`` too, to see whether ranks wait
for one that never comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.launch.forensics.stacks import Frame, nearest, threads
from pytest_distcompat.wording import listed_ranks

#: The file with the public functions of torch.distributed, as ``all_reduce``.
_C10D = "/torch/distributed/distributed_c10d.py"
#: Of these functions, those that send from one rank to another (point to point), and those that
#: wait for other ranks but leave no entry in the flight recorder.
_P2P = re.compile(r"send|recv")
_UNRECORDED = re.compile(r"_group|subgroups|monitored_barrier")
#: Collectives whose tensors may differ between ranks, by the beginnings of their names.
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter")
#: How many collectives of a rank its section shows.
_COLLECTIVES_SHOWN = 5
#: How many tensors of a collective are shown.
_TENSORS_SHOWN = 3
#: How many groups of ranks the headline describes, a group being ranks at the same place.
_DESCRIPTIONS_SHOWN = 4


@dataclass(frozen=True)
class Collective:
    """One call of a collective, as one rank's flight recorder has it."""

    #: The operation: ``all_reduce``.
    name: str
    #: The process group, as users know it: ``default_pg``, or ``mesh_dp``.
    group: str
    #: torch's internal name of the group (``0``), which differs for groups of the same name.
    key: str
    #: It is the ``number``-th collective of its group. All ranks of the group count alike.
    number: int
    #: The types and shapes of all its inputs: ``Float[3,4], Long[8]``.
    tensors: str = ""
    #: Whether the operation is done.
    finished: bool = True
    #: Whether it is a send or recv (point to point). They have numbers of their own.
    p2p: bool = False
    #: ``gloo`` or ``nccl``.
    backend: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.group}, #{self.number})"

    @property
    def counter(self) -> tuple[str, bool]:
        """The sequence in which ``number`` counts: the group's collectives, or its sends."""
        return self.key, self.p2p

    @property
    def signature(self) -> tuple[str, str]:
        """What all ranks must agree on for this number of the group.

        It is the operation and, for most operations, the tensors.
        """
        if self.name.startswith(_UNEVEN):
            return self.name, ""
        return self.name, self.tensors

    @property
    def summary(self) -> str:
        """The collective as text: ``all_reduce (default_pg, #3) of Float[4], unfinished``."""
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
        frame: The innermost frame of the user's own code, or the nearest to it.
        waits: The function of torch.distributed that the rank is in, as ``all_reduce``; empty if it
            is in none.
        unfinished: The collective that it waits for, or that it began and does not wait for.
        recorded: All collectives that the rank recorded, in order.
        connecting: Whether the rank connects to a store, the server by which the ranks of a group
            find each other.
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
        # Under NCCL it is the GPU that waits. The process may be in any code that uses the result.
        if self.unfinished is not None and self.unfinished.backend == "nccl":
            return True
        return self.waits != "" and not self.connecting

    def description(self, *, plural: bool = False) -> str:
        """Return what follows "rank 0" or, with ``plural``, "ranks 0, 1".

        For example ``waits in all_reduce (default_pg, #3) at train.py:12``.
        """
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
        # The user called a function that calls other collectives, as ``all_gather_object``.
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
    """Ranks of one group that called different collectives where they must call the same.

    Attributes:
        number: The place in the group's sequence of collectives, as ``Collective.number``.
        collective_by_rank: What each rank called there.
    """

    number: int
    collective_by_rank: Mapping[int, Collective]

    @property
    def kind(self) -> str:
        """What differs: ``different tensors`` or ``different collectives``."""
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
    """Return where a rank was, from its flight record and its stack; None without a stack.

    Args:
        record: What the rank wrote of its flight recorders; empty if it wrote nothing.
        stack: What ``faulthandler`` wrote.
    """
    frames_by_thread = threads(stack)
    if not frames_by_thread:
        return None
    frames = _thread_of_the_user(frames_by_thread)
    recorded = tuple(read_record(record))
    waits = _called_function(frames)
    unfinished = _unfinished_collective(recorded, waits)
    if not waits and unfinished and frames[0].of_torch:
        # No function of torch.distributed is in the stack, but torch is innermost: the rank is in
        # ``backward()``, or in a wait of FSDP2, whose C++ code began the collective.
        waits = unfinished.name
    return WaitState(
        nearest(frames), waits, unfinished, recorded, connecting=frames[0].of_rendezvous
    )


def _thread_of_the_user(frames_by_thread: Sequence[Sequence[Frame]]) -> Sequence[Frame]:
    """Return the frames of the first thread that runs code of the user's own.

    It is the main thread, unless the main thread only waits for other threads to end. Without a
    thread that runs such code it is the main thread too.
    """
    for frames in frames_by_thread:
        if any(frame.of_the_user for frame in frames):
            return frames
    return frames_by_thread[0]


def _called_function(frames: Sequence[Frame]) -> str:
    """Return the name of the public function of torch.distributed that the user's code called.

    It is the outermost one, as ``all_gather_object`` for a rank that waits in the ``all_gather``
    within; empty if there is none.
    """
    called = ""
    # Frames come innermost first, so the last match is the outermost.
    for frame in frames:
        if frame.file.endswith(_C10D) and not frame.function.startswith("_"):
            called = frame.function
    return called


def _unfinished_collective(recorded: Iterable[Collective], waits: str) -> Collective | None:
    """Return the collective that a rank in the function ``waits`` began last and has not finished.

    If the rank is in no function (``waits`` is empty), any unfinished collective counts. In a send
    or recv only those count, and in a collective only collectives. Return None if there is none.
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
    """Return the collectives of a rank's recorders, in the order of their calls.

    If a group was destroyed and made again, only its collectives after that are returned: their
    numbers begin anew, and the report compares numbers.

    Args:
        record: A line of JSON for each recorder, ``{"entries": [...]}``. A line that a dying rank
            left half written is passed over.
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
            # The group was made again.
            collectives = [
                earlier for earlier in collectives if earlier.counter != collective.counter
            ]
        last_numbers[collective.counter] = collective.number
        collectives.append(collective)
    return collectives


def _collective(entry: Mapping[str, Any]) -> Collective:
    """Return the collective of an entry of the flight recorder.

    Args:
        entry: The entry as torch/csrc/distributed/c10d/FlightRecorder.hpp writes it, with keys such
            as ``"process_group": ["0", "default_pg"]``, ``"profiling_name": "gloo:all_reduce"`` and
            ``"input_sizes": [[3, 4]]``.
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
        # gloo leaves the state at "scheduled", and shows by "retired" that it is done.
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
    """Return one line that says which ranks are where; ranks at the same place are named together.

    Args:
        wait_states: By rank, for each rank that hangs; None if it gave no stack.
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
    """Return the first collective in which ranks of a group disagree; None if there is none.

    Sends and receives are left out: two ranks of a group need not send alike.
    """
    #: By group (``key``) and number, what each rank called there.
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
