"""Conclude how a run ended, from the logs of its ranks and the ends of their processes.

``conclude`` is called once for each run, when its ranks are gone: by the watchdog on one machine,
by ``ext/cluster/run`` with the reports of several machines, and by extensions with what stood in
for ranks. ``ext/inside/agreement`` calls it for a test phase that failed or was skipped on some
rank.

It gets two dicts: by rank the events of its log (``events.Start``, ``Action``, ``Done``, ``Error``,
...), and by rank a ``RankProcess``. It returns an ``Ending``. For example, a rank with the last
event ``Action("step")`` and the exit code -9 becomes ``RankEnd(status="killed", message="was killed
by SIGKILL during 'step'")``.

Two words: the *agent* is the part of torchrun that starts ranks and waits for them, and an
*excused* rank has left its test as the test allows, by a skip or an expected failure. At the end
``root_cause.fold`` separates causes from consequences: an end that another rank's end explains, as
a lost connection, gets another status.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_distcompat.events import Done, Error, Event, Excused, Raised, Start, is_excused, of_kind
from pytest_distcompat.excerpt import encodable
from pytest_distcompat.launch.forensics import deaths
from pytest_distcompat.launch.forensics.collectives import read_wait_state
from pytest_distcompat.launch.forensics.ending import (
    NEVER_STARTED,
    Ending,
    RankEnd,
    current_action,
    exit_name,
)
from pytest_distcompat.launch.forensics.root_cause import LOST_WITH_NODE, fold, gone_since

#: The message about a rank that waited for a rank which had left its test.
_LEFT_WAITING = "waited for ranks that had left the test, and was killed"


@dataclass(frozen=True)
class RankProcess:
    """How the process of one rank ended, and what it left besides its log.

    Attributes:
        code: The exit code; negative for signals (-9 is SIGKILL), None where unknown.
        ended_by_us: Whether this package killed it: at the time limit, or because it outlived
            another rank's failure.
        ended_at: When the agent saw that it was gone, in seconds of CLOCK_MONOTONIC; None if it did
            not.
        output: The last lines of its stdout and stderr.
        stack: The Python stacks of its threads, as ``faulthandler`` wrote them on request.
        record: The last collectives, from torch's flight recorder: a line of JSON for each
            recorder.
        node: The name of its machine in a run over several, as ``n2``.
        lost: Why the connection to that machine is gone; empty while it is there.
        no_space: That the disk is full, which may be why it wrote no report; empty otherwise.
    """

    code: int | None = None
    ended_by_us: bool = False
    ended_at: float | None = None
    output: str = ""
    stack: str = ""
    record: str = ""
    node: str = ""
    lost: str = ""
    no_space: str = ""


def conclude(
    events: Mapping[int, Sequence[Event]],
    processes: Mapping[int, RankProcess],
    *,
    timed_out: bool = False,
    ended_since: float = math.inf,
    first: int | None = None,
    oom_kills: int = 0,
    **more: Any,
) -> Ending:
    """Put together what is known of each rank, and return how the run ended.

    The function only computes: it reads no file and kills no process.

    Args:
        events: By rank, what it logged.
        processes: By rank, how its process ended.
        timed_out: Whether the ranks that were killed by us were killed at the time limit.
        ended_since: When the first rank was killed by us, in seconds of CLOCK_MONOTONIC.
        first: The rank that the agent saw fail first; None if it saw none.
        oom_kills: What ``deaths.out_of_memory_kills`` returned after the run: how many processes
            the kernel has killed for lack of memory since it booted.
        **more: Further fields of the ``Ending``, as ``seconds`` and ``command``.
    """
    allows_waiting = any(map(is_excused, events.values()))
    ends = []
    for rank, process in processes.items():
        evidence = _Evidence(
            events=events[rank],
            process=process,
            timed_out=timed_out,
            allows_waiting=allows_waiting,
            other_failed_first=first not in {None, rank},
            oom_kills=oom_kills,
        )
        ends.append(_rank_end(rank, evidence))
    ends = _with_times_of_death(ends, processes)
    if allows_waiting and _all_wait_for_others(ends):
        # They wait for a rank that left its test as the test allows, by a skip. That is no hang:
        # the skip is the outcome of the test.
        timed_out = False
        for number, end in enumerate(ends):
            if end.status == "stuck":
                ends[number] = replace(end, status="stopped", message=_LEFT_WAITING)
    # By rank, the time before which no other rank can have lost its connection to it.
    gone_since_by_rank: dict[int, float] = {}
    for rank, logged in events.items():
        # A rank that we killed cannot have kept its connections longer than that.
        gone_since_by_rank[rank] = min(gone_since(logged), ended_since)
    folded = fold(ends, first, gone_since_by_rank)
    return Ending(tuple(folded), events, timed_out=timed_out, **more)


def _with_times_of_death(
    ends: Sequence[RankEnd], processes: Mapping[int, RankProcess]
) -> list[RankEnd]:
    """Return the ends, with the time of death of ranks that could not report.

    It is the time at which the agent saw the process gone. The agent stops looking once it has seen
    a failed rank, so some deaths are unseen. Such a rank died after the last death that was seen,
    or after its own last event, whichever is later.
    """
    died_at = {}
    for rank, process in processes.items():
        if process.ended_at is not None:
            died_at[rank] = process.ended_at
    last_death = max(died_at.values(), default=0.0)
    with_times = []
    for end in ends:
        if end.status in {"killed", "exited"}:
            time = died_at.get(end.rank, max(end.time, last_death))
            with_times.append(replace(end, time=time))
        else:
            with_times.append(end)
    return with_times


def _all_wait_for_others(ends: Sequence[RankEnd]) -> bool:
    """Tell whether some rank hangs, and each one that hangs waits for other ranks."""
    any_hangs = False
    for end in ends:
        if end.status != "stuck":
            continue
        any_hangs = True
        if end.wait_state is None or not end.wait_state.waiting:
            return False
    return any_hangs


@dataclass(frozen=True)
class _Evidence:
    """What is known of how one rank ended.

    Attributes:
        events: What it logged.
        process: How its process ended, and what it left.
        timed_out: Whether the run reached its time limit.
        allows_waiting: Whether some rank left its test as the test allows, and waits for the
            others: its last event is ``Excused``.
        other_failed_first: Whether the agent had seen another rank fail before it ended this one.
        oom_kills: As for ``conclude``.
    """

    events: Sequence[Event]
    process: RankProcess
    timed_out: bool
    allows_waiting: bool
    other_failed_first: bool
    oom_kills: int

    @property
    def hung(self) -> bool:
        """Whether it was killed at the time limit."""
        return self.process.ended_by_us and self.timed_out

    @property
    def done(self) -> bool:
        """Whether it had finished its work."""
        return bool(of_kind(Done, self.events))

    @property
    def when(self) -> str:
        """What it was at, as the end of a sentence: `` during 'step'``; empty if unknown."""
        if self.done:
            return " after it had finished its work"
        action = current_action(self.events)
        if action is None:
            return ""
        return f" during {action.action!r}"

    @property
    def exception(self) -> Raised | None:
        """The exception with which it ended; None if it ended in another way.

        An ``Excused`` event (the rank skipped, say) counts only if the rank was ended while it
        waited for the others. An ``Error`` of a rank that was killed at the time limit does not
        count: it came after the limit, when the rank's peers were being killed.
        """
        exceptions: list[Raised] = []
        if self._waited_for_others():
            exceptions += of_kind(Excused, self.events)
        if not exceptions and not self.hung:
            exceptions += of_kind(Error, self.events)
        return exceptions[-1] if exceptions else None

    def _waited_for_others(self) -> bool:
        """Tell whether the rank had left its test and was ended while it waited for the others.

        The watchdog may have killed it, or the agent, which sends SIGTERM to all ranks once one
        has failed. The agent may do so even when the rank has gone on and is done.
        """
        by_agent = self.process.code == -signal.SIGTERM
        if is_excused(self.events):
            return self.process.ended_by_us or by_agent or self.process.code is None
        return self.done and self.other_failed_first and by_agent


def _rank_end(rank: int, evidence: _Evidence) -> RankEnd:
    """Return how one rank ended.

    The signs are looked at in the order of their certainty: an exception that the rank logged, then
    its last event with exit code 0, then who killed it and why, then the exit code.
    """
    events = evidence.events
    process = evidence.process
    last = events[-1] if events else None
    time = last.time if last is not None else 0.0
    end = RankEnd(rank, "done", time=time, last=last, output=process.output, node=process.node)
    exception = evidence.exception
    if exception is not None:
        return _raised(end, exception)
    if not process.ended_by_us and evidence.done and process.code in {0, None}:
        return end
    if process.lost:
        return replace(end, status="killed", message=f"{LOST_WITH_NODE}{process.lost}")
    # The rank wrote the stack at the time limit, or when another rank gave up waiting for it.
    end = replace(end, stack=process.stack)
    if evidence.hung:
        # Where it hung and for which collective it waited; None without a stack.
        wait_state = read_wait_state(process.record, process.stack)
        message = f"was still running at the time limit{evidence.when}"
        return replace(end, status="stuck", wait_state=wait_state, message=message)
    if process.ended_by_us:
        message = f"outlived another rank's failure and was killed{evidence.when}"
        if evidence.allows_waiting:
            message = _LEFT_WAITING
        return replace(end, status="stopped", message=message)
    return _end_without_report(end, evidence)


def _raised(end: RankEnd, exception: Raised) -> RankEnd:
    """Return the end of a rank that logged an exception."""
    return replace(
        end,
        status="raised",
        message=encodable(f"raised {exception.message}"),
        text=encodable(exception.text),
        time=exception.time,
        kind=exception.kind,
        lost=exception.lost,
    )


def _end_without_report(end: RankEnd, evidence: _Evidence) -> RankEnd:
    """Return the end of a rank that reported nothing and that this package did not kill.

    The kernel, a scheduler or another process killed it, or it called ``os._exit``.
    """
    code = evidence.process.code
    reason = ""
    if evidence.process.no_space:
        reason = f": {evidence.process.no_space}"
    starts = of_kind(Start, evidence.events)
    if not starts:
        ending = f" ({exit_name(code)})" if code else ""
        return replace(end, status="missing", message=f"{NEVER_STARTED}{ending}{reason}")
    if code is None:
        message = f"ended without a report{evidence.when}{reason}"
        return replace(end, status="exited", message=message)
    if code >= 0:
        message = f"exited with code {code} without a report{evidence.when}{reason}"
        return replace(end, status="exited", message=message)
    # How many processes the kernel killed for lack of memory while the rank ran: this one, perhaps.
    kills_before = starts[0].oom_kills
    kills_meanwhile = None
    if kills_before is not None:
        kills_meanwhile = evidence.oom_kills - kills_before
    lines = deaths.explain(-code, kills_meanwhile, _last_memory(evidence.events))
    message = f"was killed by {exit_name(code)}{evidence.when}"
    return replace(end, status="killed", message=message, text="\n".join(lines))


def _last_memory(events: Sequence[Event]) -> int:
    """Return the resident memory that a rank logged last, in bytes; 0 if it logged none."""
    for event in reversed(events):
        if event.memory:
            return event.memory
    return 0
