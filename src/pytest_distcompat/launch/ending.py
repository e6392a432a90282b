"""The ending of a run, from what its ranks wrote and how their processes ended: never weaker than the worst rank.

The rank that failed first is the cause and is shown first; ranks that only lost their peer, or were ended because of
it, are folded under it.
"""

from __future__ import annotations

import itertools
import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_distcompat.events import (
    Action,
    Done,
    Error,
    Event,
    Excused,
    Raised,
    SnapshotTaken,
    Start,
    is_excused,
    of_kind,
)
from pytest_distcompat.excerpt import encodable, name_nodes
from pytest_distcompat.launch import deaths
from pytest_distcompat.launch.collectives import WaitState, describe_wait_states, first_mismatch, read_wait_state
from pytest_distcompat.launch.peers import aborted_by_lost_peer
from pytest_distcompat.launch.stacks import without_launcher

#: How the message about a rank begins whose node is gone.
_LOST = "was lost with its node: "
#: The message about a rank that waited for a rank which had left its test.
_LEFT_WAITING = "waited for ranks that had left the test, and was killed"
#: Where an object lies, as Python's repr has it.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``status``: ``done``; ``raised`` (it reported an exception); ``excused`` (it reported one that its test allows);
    ``killed`` and ``exited`` (it could not report; a rank that is lost with its node is killed too);
    ``stuck`` (the time limit found it running); ``lost peer`` and ``stopped`` (consequences of another rank's end);
    ``missing`` (it never started). A rank that is stuck has a ``stack`` and, made of that, a ``wait_state``;
    one that others gave up waiting for has the ``stack``. ``lost``: what it raised only says that another rank is gone.
    """

    rank: int
    status: str
    message: str = ""
    text: str = ""
    kind: str = ""
    time: float = 0.0
    stack: str = ""
    wait_state: WaitState | None = None
    output: str = ""
    lost: bool = False
    last: Event | None = None
    node: str = ""

    @property
    def who(self) -> str:
        """The rank, and its node in a run of several: ``rank 3 on n2``."""
        return f"rank {self.rank} on {self.node}" if self.node else f"rank {self.rank}"


@dataclass(frozen=True)
class Ending:
    """How all ranks of a run ended, and what each wrote.

    ``left`` says why reused ranks were ended early; ``leaks`` what stayed in use of the devices after the ranks were gone:
    a failure, however they ended. ``builds`` names the processes whose builds of an extension the ranks waited for.
    """

    ranks: tuple[RankEnd, ...]
    events: Mapping[int, Sequence[Event]]
    seconds: float = 0.0
    timeout: float = 0.0
    timed_out: bool = False
    launch_error: str = ""
    notice: str = ""
    left: str = ""
    left_over: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    command: str = ""
    builds: str = ""

    @classmethod
    def not_launched(cls, world_size: int, problem: str) -> Ending:
        """Return the ending of a run whose launcher failed before any rank started."""
        ranks = range(world_size)
        return conclude(dict.fromkeys(ranks, ()), dict.fromkeys(ranks, RankProcess()), launch_error=problem)

    @property
    def failed(self) -> bool:
        """Tell whether anything at all went wrong."""
        return bool(self.leaks) or self._ranks_failed

    @property
    def _ranks_failed(self) -> bool:
        return bool(self.launch_error) or self.timed_out or any(end.status != "done" for end in self.ranks)

    @property
    def kind(self) -> str:
        """One of ``ok``, ``raised``, ``leaked``, ``hung`` and ``crashed``: the worst that happened to any rank.

        An exception may be expected; a leak, a crash and a hang beside it cannot be.
        """
        statuses = {end.status for end in self.ranks} - {"done"}
        if self.launch_error or statuses & {"killed", "exited", "missing"}:
            return "crashed"
        if self.timed_out:
            return "hung"
        if statuses and not statuses & {"raised", "excused", "lost peer"}:
            # "stopped" alone: no rank is the cause, and no exception explains the end.
            return "crashed"
        return "leaked" if self.leaks else "raised" if statuses else "ok"

    @property
    def cause(self) -> RankEnd | None:
        """The rank that failed first."""
        return next(iter(self.in_order()), None)

    def in_order(self) -> list[RankEnd]:
        """Return the ranks that did not end well: causes by time, then hangs, then what tests allow, then consequences.

        Of the ranks that hang those that wait for others come last.
        """
        order = ({"raised", "killed", "exited"}, {"missing"}, {"stuck"}, {"excused"}, {"lost peer"}, {"stopped"})
        weight = {status: number for number, statuses in enumerate(order) for status in statuses}
        bad = [end for end in self.ranks if end.status != "done"]
        waits = {end.rank: end.wait_state is not None and bool(end.wait_state.waits) for end in bad}
        return sorted(bad, key=lambda end: (weight[end.status], waits[end.rank], end.time, end.rank))

    def headline(self) -> str:
        """Return one line: which rank, and what happened to it, or what leaked if all ranks ended well."""
        if self.leaks and not self._ranks_failed:
            return "; ".join(self.leaks)
        if self.launch_error:
            message = self.launch_error.strip().splitlines()[-1]
            return message if any(self.events.values()) else f"the ranks could not be started: {message}"
        cause = self.cause
        if cause is None:
            late = f"time limit of {self.timeout:g} s passed while the ranks were leaving, all of them done"
            return late if self.timed_out else "all ranks ended well"
        if self.timed_out and cause.status == "stuck":
            mismatch = first_mismatch(self._wait_states)
            parts = [f"time limit of {self.timeout:g} s"]
            if mismatch is not None:
                parts.append(mismatch.kind)
            parts.append(name_nodes(describe_wait_states(self._wait_states), self.nodes))
            if self.builds:
                parts.append(self.builds)
            return ": ".join(parts)
        return f"{cause.who} {cause.message}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The name of each rank's node, in a run of several; empty in any other."""
        found = tuple(end.node for end in sorted(self.ranks, key=lambda end: end.rank))
        return found if any(found) else ()

    def without_nodes(self) -> Ending:
        """Return the same ending without the names of nodes, as of a run on one node."""
        return replace(self, ranks=tuple(replace(end, node="") for end in self.ranks))

    @property
    def _wait_states(self) -> dict[int, WaitState | None]:
        return {end.rank: end.wait_state for end in self.ranks if end.status == "stuck"}

    def text(self) -> str:
        """Return the whole report, first cause first; a leak comes last, because it was found last."""
        if self.leaks and not self._ranks_failed:
            return "\n\n".join(self.leaks)
        parts = [self.headline()]
        mismatch = first_mismatch(self._wait_states)
        if mismatch is not None:
            parts.append(name_nodes(str(mismatch), self.nodes))
        if self.launch_error:
            parts.append(self.launch_error)
        folded: list[RankEnd] = []
        sections: dict[str, tuple[str, str, list[RankEnd]]] = {}
        for end in self.in_order():
            if end.status in {"lost peer", "stopped"}:
                folded.append(end)
            else:
                message, body = _first_line(end.message), _section(end)
                # Each process has its own addresses, which tracebacks show in the repr of a fixture.
                alike = _ADDRESS.sub("", f"{message}\n{body}")
                sections.setdefault(alike, (message, body, []))[2].append(end)
        # Ranks with the same story share a section.
        for message, body, ends in sections.values():
            parts.append("\n".join(filter(None, (f"--- {_name_ends(ends)}: {message} ---", body))))
        if folded:
            lines = (f"  {end.who} {_first_line(end.message)}" for end in folded)
            parts.append("\n".join(["consequences:", *lines]))
            parts += [
                f"where {end.who} was when another one gave up waiting (most recent call first):\n{shown}"
                for end in folded
                if (shown := without_launcher(end.stack))
            ]
        if self.left_over:
            parts.append("left running by a rank, now killed: " + ", ".join(self.left_over))
        return "\n\n".join([*(part.rstrip() for part in parts), *self.leaks])


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as a text: ``rank 1``, or ``ranks 0, 1 and 3``."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _name_ends(ends: Sequence[RankEnd]) -> str:
    """Return the ranks as a text, by node in a run of several: ``ranks 0 and 1 on n1, rank 2 on n2``."""
    by_node: dict[str, list[int]] = {}
    for end in ends:
        by_node.setdefault(end.node, []).append(end.rank)
    return ", ".join(name_ranks(ranks) + (f" on {node}" if node else "") for node, ranks in by_node.items())


def _section(end: RankEnd) -> str:
    lines = [end.text.rstrip()] if end.text else []
    if end.wait_state is not None and end.wait_state.recorded:
        lines.append(end.wait_state.history())
    if end.status == "stuck" and (shown := without_launcher(end.stack)):
        lines.append(f"Python stack at the time limit (most recent call first):\n{shown}")
    if end.output and end.status in {"killed", "exited", "stuck", "missing"}:
        lines.append("last output:\n" + end.output.rstrip())
    return "\n".join(lines)


@dataclass(frozen=True)
class RankProcess:
    """How the process of one rank ended, and what it left besides its log.

    Attributes:
        code: The exit code; negative for signals, None where unknown.
        ended_by_us: Whether it was killed at the time limit, or because it outlived another rank's failure.
        ended_at: When the agent saw that it was gone, None where it did not.
        output: The last lines of its output.
        stack: The stacks that it wrote when it was asked to.
        record: What torch's flight recorder held, as the rank wrote it.
        node: The name of its node in a run of several.
        lost: Why its node is gone; empty while it is there.
        no_space: Why it could not write a report; empty if its directory has room for one, or it needed none.
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
    """Put together what is known of each rank: what it logged, and how its process ended. It reads and changes nothing.

    ``ended_since`` is when the first rank was killed by us, ``first`` the rank that the agent saw fail first, ``oom_kills`` what
    ``deaths.out_of_memory_kills`` returned after the run; ``more`` are further fields of the ``Ending``.
    """
    ended = "stuck" if timed_out else "stopped"
    waited = any(map(is_excused, events.values()))
    ends = [
        _rank_end(
            rank,
            events[rank],
            process,
            ended=ended if process.ended_by_us else "",
            waited=waited,
            followed=first not in {None, rank},
            oom_kills=oom_kills,
        )
        for rank, process in processes.items()
    ]
    died = {rank: process.ended_at for rank, process in processes.items() if process.ended_at is not None}
    # The agent stops looking once it has seen a rank gone: a rank that died unseen did so at that time or later.
    last = max(died.values(), default=0.0)
    ends = [
        replace(end, time=died.get(end.rank, max(end.time, last))) if end.status in {"killed", "exited"} else end
        for end in ends
    ]
    stuck = [end for end in ends if end.status == "stuck"]
    if stuck and waited and all(end.wait_state and end.wait_state.waiting for end in stuck):
        # They wait for a rank that left its test as the test allows.
        timed_out = False
        ends = [replace(end, status="stopped", message=_LEFT_WAITING) if end in stuck else end for end in ends]
    gone_since = {rank: min(_gone_since(logged), ended_since) for rank, logged in events.items()}
    return Ending(tuple(_fold(ends, first, gone_since)), events, timed_out=timed_out, **more)


def _rank_end(  # noqa: PLR0911 - a return for each way to end, the surest sign first
    rank: int,
    events: Sequence[Event],
    process: RankProcess,
    *,
    ended: str,
    waited: bool,
    followed: bool,
    oom_kills: int,
) -> RankEnd:
    """Return how one rank ended; ``followed`` means that the agent had seen another rank fail before it ended this one."""
    last = events[-1] if events else None
    done, errors, code = bool(of_kind(Done, events)), of_kind(Error, events), process.code
    known: dict[str, Any] = {"rank": rank, "time": last.time if last else 0.0, "last": last}
    known |= {"output": process.output, "node": process.node}
    # A rank that waited for the others was ended with them: by us, or by the agent, which may come when it is through itself.
    waits = isinstance(last, Excused) and (ended or code in {None, -signal.SIGTERM})
    excused = of_kind(Excused, events) if waits or (done and followed and code == -signal.SIGTERM) else ()
    if excused or (errors and ended != "stuck"):
        error = (excused or errors)[-1]
        assert isinstance(error, Raised)
        known |= {"message": encodable(f"raised {error.message}"), "text": encodable(error.text)}
        known |= {"time": error.time, "kind": error.kind, "lost": error.lost}
        return RankEnd(**known, status="raised")
    if not ended and done and code in {0, None}:
        return RankEnd(**known, status="done")
    if process.lost:
        return RankEnd(**known, status="killed", message=f"{_LOST}{process.lost}")
    # At the time limit, or when another rank gave up waiting for this one.
    known["stack"] = process.stack
    action = current_action(events)
    during = f" during {action.action!r}" if action is not None else ""
    after = " after it had finished its work" if done else during
    if ended == "stopped":
        message = _LEFT_WAITING if waited else f"outlived another rank's failure and was killed{after}"
        return RankEnd(**known, status="stopped", message=message)
    if ended == "stuck":
        known["wait_state"] = read_wait_state(process.record, process.stack)
        return RankEnd(**known, status="stuck", message=f"was still running at the time limit{after}")
    starts = of_kind(Start, events)
    reason = f": {process.no_space}" if process.no_space else ""
    if not starts:
        ending = f" ({exit_name(code)})" if code else ""
        return RankEnd(**known, status="missing", message=f"never started{ending}{reason}")
    if code is not None and code < 0:
        began = starts[0].oom_kills
        memory = next((event.memory for event in reversed(events) if event.memory), 0)
        text = "\n".join(deaths.explain(-code, None if began is None else oom_kills - began, memory))
        return RankEnd(**known, status="killed", message=f"was killed by {exit_name(code)}{after}", text=text)
    if code is None:
        return RankEnd(**known, status="exited", message=f"ended without a report{after}{reason}")
    return RankEnd(**known, status="exited", message=f"exited with code {code} without a report{after}{reason}")


def current_action(events: Sequence[Event]) -> Action | None:
    """Return the action that a rank has begun and not finished."""
    progress = [event for event in events if isinstance(event, (Action, SnapshotTaken))]
    return progress[-1] if progress and isinstance(progress[-1], Action) else None


def exit_name(code: int | None) -> str:
    """Return an exit code as text; a signal by its name."""
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _gone_since(events: Sequence[Event]) -> float:
    """Return the time before which no other rank can have lost this one: while it is excused it keeps its connections."""
    since_excused = list(itertools.dropwhile(lambda event: not isinstance(event, Excused), events))
    return next((event.time for event in since_excused[1:]), math.inf) if since_excused else -math.inf


def _fold(ends: Sequence[RankEnd], first: int | None, gone_since: Mapping[int, float]) -> list[RankEnd]:
    """Mark as consequence what another rank's end explains; what nothing explains stays a cause."""

    def consequence(end: RankEnd) -> str:
        if end.status == "raised" and end.lost:
            return "lost peer"
        if end.message.startswith(_LOST):
            # Whatever the reason names: SIGTERM, say.
            return ""
        # The agent ends the other ranks by SIGTERM once one has failed; that one may have got its SIGTERM elsewhere.
        if end.status in {"killed", "missing"} and "SIGTERM" in end.message and end.rank != first:
            return "stopped"
        # gloo throws in a thread of its own, where nothing catches it: abort() in a rank whose peer went away.
        if end.status == "killed" and "SIGABRT" in end.message and aborted_by_lost_peer(end.output):
            return "lost peer"
        return ""

    working = [end for end in ends if end.status == "stuck" and not isinstance(end.last, Done)]
    if working:
        # torchrun keeps ranks that are done until the last one is: those did not hang.
        ends = [
            replace(end, status="done") if end.status == "stuck" and isinstance(end.last, Done) else end for end in ends
        ]

    def explained(end: RankEnd) -> bool:
        if (isinstance(end.last, Raised) and end.last.cut) or consequence(end) != "lost peer":
            return True
        return any(end.time >= gone_since[root.rank] for root in roots)

    roots = [end for end in ends if end.status not in {"done", "stopped"} and not consequence(end)]
    if not roots:
        # Each is another's consequence. A rank that raised is nearer to the cause than those that were ended.
        raised = any(end.status == "raised" for end in ends)
        ends = [replace(end, status="stopped") if raised and consequence(end) == "stopped" else end for end in ends]
        # Those too that the agent ended while they were leaving.
        finished = [end.rank for end in ends if isinstance(end.last, Done)]
        return [
            replace(end, message=f"needed {name_ranks(finished)}, which had finished: it {end.message}")
            if finished and consequence(end) == "lost peer"
            else end
            for end in ends
        ]
    return [replace(end, status=consequence(end) or end.status) if explained(end) else end for end in ends]
