"""The ending of a run: never weaker than that of the worst rank.

It follows from what the ranks wrote and how their processes ended. The rank that failed first is
the cause and is shown first; ranks that only lost their peer, or were ended because of it, are
folded under it.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from pytest_distcompat.excerpt import encodable
from pytest_distcompat.launch.forensics import deaths
from pytest_distcompat.launch.forensics.collectives import (
    WaitState,
    describe_wait_states,
    first_mismatch,
    read_wait_state,
)
from pytest_distcompat.launch.forensics.stacks import without_launcher
from pytest_distcompat.launch.peers import aborted_by_lost_peer
from pytest_distcompat.spread import Hosts

#: How the message about a rank begins whose node is gone.
_LOST = "was lost with its node: "
#: The message about a rank that waited for a rank which had left its test.
_LEFT_WAITING = "waited for ranks that had left the test, and was killed"
#: The statuses of ranks that did not end well, in the order in which a report shows them.
_ORDER = {
    "raised": 0,
    "killed": 0,
    "exited": 0,
    "missing": 1,
    "stuck": 2,
    "excused": 3,
    "lost peer": 4,
    "stopped": 5,
}
#: Where an object lies, as Python's repr has it.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``status``: ``done``; ``raised`` (it reported an exception); ``excused`` (it reported one that
    its test allows); ``killed`` and ``exited`` (it could not report; a rank that is lost with its
    node is killed too); ``stuck`` (the time limit found it running); ``lost peer`` and ``stopped``
    (consequences of another rank's end); ``missing`` (it never started). A rank that is stuck has a
    ``stack`` and, made of that, a ``wait_state``; one that others gave up waiting for has the
    ``stack``. ``lost``: what it raised only says that another rank is gone.
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
        if not self.node:
            return f"rank {self.rank}"
        return f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class Ending:
    """How all ranks of a run ended, and what each wrote.

    ``leaks`` says what stayed in use of the devices after the ranks were gone: a failure, however
    they ended. ``builds`` names the processes whose builds of an extension the ranks waited for.
    ``properties`` are added to those of a marked test.
    """

    ranks: tuple[RankEnd, ...]
    events: Mapping[int, Sequence[Event]]
    seconds: float = 0.0
    timeout: float = 0.0
    timed_out: bool = False
    launch_error: str = ""
    notice: str = ""
    left_over: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    command: str = ""
    builds: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def not_launched(cls, world_size: int, problem: str) -> Ending:
        """Return the ending of a run whose launcher failed before any rank started."""
        ranks = range(world_size)
        return conclude(
            dict.fromkeys(ranks, ()), dict.fromkeys(ranks, RankProcess()), launch_error=problem
        )

    @property
    def failed(self) -> bool:
        """Tell whether anything at all went wrong."""
        return bool(self.leaks) or self._ranks_failed

    @property
    def _ranks_failed(self) -> bool:
        if self.launch_error or self.timed_out:
            return True
        return any(end.status != "done" for end in self.ranks)

    @property
    def kind(self) -> str:
        """Return the worst that happened to any rank.

        It is one of ``ok``, ``raised``, ``leaked``, ``hung`` and ``crashed``. An exception may be
        expected; a leak, a crash and a hang beside it cannot be.
        """
        statuses = {end.status for end in self.ranks} - {"done"}
        if self.launch_error or statuses & {"killed", "exited", "missing"}:
            return "crashed"
        if self.timed_out:
            return "hung"
        if statuses and not statuses & {"raised", "excused", "lost peer"}:
            # "stopped" alone: no rank is the cause, and no exception explains the end.
            return "crashed"
        if self.leaks:
            return "leaked"
        return "raised" if statuses else "ok"

    @property
    def cause(self) -> RankEnd | None:
        """The rank that failed first."""
        failed = self.in_order()
        return failed[0] if failed else None

    def in_order(self) -> list[RankEnd]:
        """Return the ranks that did not end well, the cause first.

        Causes stand first, by time, then hangs, then what tests allow, then consequences. Of the
        ranks that hang those that wait for others come last.
        """

        def position(end: RankEnd) -> tuple[int, bool, float, int]:
            waits = end.wait_state is not None and end.wait_state.waits != ""
            return _ORDER[end.status], waits, end.time, end.rank

        failed = [end for end in self.ranks if end.status != "done"]
        return sorted(failed, key=position)

    def headline(self) -> str:
        """Return one line: which rank, and what happened to it.

        If all ranks ended well, it says what leaked.
        """
        if self.leaks and not self._ranks_failed:
            return "; ".join(self.leaks)
        if self.launch_error:
            message = self.launch_error.strip().splitlines()[-1]
            any_started = any(self.events.values())
            return message if any_started else f"the ranks could not be started: {message}"
        cause = self.cause
        if cause is None:
            if self.timed_out:
                return (
                    f"time limit of {self.timeout:g} s passed "
                    "while the ranks were leaving, all of them done"
                )
            return "all ranks ended well"
        if self.timed_out and cause.status == "stuck":
            return self._hang()
        return f"{cause.who} {cause.message}"

    def _hang(self) -> str:
        """Return one line on a run in which ranks hang.

        It says where they are, and what they disagree in.
        """
        parts = [f"time limit of {self.timeout:g} s"]
        mismatch = first_mismatch(self._wait_states)
        if mismatch is not None:
            parts.append(mismatch.kind)
        parts.append(self.hosts.name_in(describe_wait_states(self._wait_states)))
        if self.builds:
            parts.append(self.builds)
        return ": ".join(parts)

    @property
    def hosts(self) -> Hosts:
        """The machine of each rank, if the run is not on this one."""
        by_rank = sorted(self.ranks, key=lambda end: end.rank)
        names = tuple(end.node for end in by_rank)
        if not any(names):
            return Hosts()
        return Hosts(names)

    def without_hosts(self) -> Ending:
        """Return the same ending without the names of machines, as of a run on this one."""
        ends = [replace(end, node="") for end in self.ranks]
        return replace(self, ranks=tuple(ends))

    @property
    def _wait_states(self) -> dict[int, WaitState | None]:
        """Where each rank that hangs was at the time limit; None if it gave no stack."""
        return {end.rank: end.wait_state for end in self.ranks if end.status == "stuck"}

    def text(self) -> str:
        """Return the whole report, first cause first.

        A leak comes last, because it was found last.
        """
        if self.leaks and not self._ranks_failed:
            return "\n\n".join(self.leaks)
        parts = [self.headline()]
        mismatch = first_mismatch(self._wait_states)
        if mismatch is not None:
            parts.append(self.hosts.name_in(str(mismatch)))
        if self.launch_error:
            parts.append(self.launch_error)
        consequences = []
        causes = []
        for end in self.in_order():
            if end.status in {"lost peer", "stopped"}:
                consequences.append(end)
            else:
                causes.append(end)
        parts += map(str, _sections(causes))
        parts += _describe_consequences(consequences)
        if self.left_over:
            parts.append("left running by a rank, now killed: " + ", ".join(self.left_over))
        parts = [part.rstrip() for part in parts]
        return "\n\n".join([*parts, *self.leaks])


@dataclass
class _Section:
    """A section of the report: ranks that ended in the same way, and what they left."""

    message: str
    body: str
    ends: list[RankEnd]

    def __str__(self) -> str:
        title = f"--- {_name_ends(self.ends)}: {self.message} ---"
        if not self.body:
            return title
        return f"{title}\n{self.body}"


def _sections(ends: Sequence[RankEnd]) -> list[_Section]:
    """Return the sections of these ranks; those with the same story share one."""
    sections: dict[str, _Section] = {}
    for end in ends:
        section = _Section(_first_line(end.message), _section_body(end), [])
        # Each process has its own addresses, which tracebacks show in the repr of a fixture.
        story = _ADDRESS.sub("", f"{section.message}\n{section.body}")
        sections.setdefault(story, section).ends.append(end)
    return list(sections.values())


def _section_body(end: RankEnd) -> str:
    """Return what a rank left: its traceback, its last collectives, its stack and its output."""
    lines = []
    if end.text:
        lines.append(end.text.rstrip())
    if end.wait_state is not None and end.wait_state.recorded:
        lines.append(end.wait_state.history())
    if end.status == "stuck":
        stack = without_launcher(end.stack)
        if stack:
            lines.append(f"Python stack at the time limit (most recent call first):\n{stack}")
    if end.output and end.status in {"killed", "exited", "stuck", "missing"}:
        lines.append("last output:\n" + end.output.rstrip())
    return "\n".join(lines)


def _describe_consequences(ends: Sequence[RankEnd]) -> list[str]:
    """Return the parts of the report on ranks that ended because another one did."""
    if not ends:
        return []
    lines = [f"  {end.who} {_first_line(end.message)}" for end in ends]
    parts = ["\n".join(["consequences:", *lines])]
    for end in ends:
        stack = without_launcher(end.stack)
        if stack:
            title = (
                f"where {end.who} was when another one gave up waiting (most recent call first):"
            )
            parts.append(f"{title}\n{stack}")
    return parts


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as a text: ``rank 1``, or ``ranks 0, 1 and 3``."""
    *most, last = map(str, sorted(ranks))
    if not most:
        return f"rank {last}"
    listed = ", ".join(most)
    return f"ranks {listed} and {last}"


def _name_ends(ends: Sequence[RankEnd]) -> str:
    """Return the ranks as a text, by node in a run of several.

    Example: ``ranks 0 and 1 on n1, rank 2 on n2``.
    """
    ranks_by_node: dict[str, list[int]] = {}
    for end in ends:
        ranks_by_node.setdefault(end.node, []).append(end.rank)
    names = []
    for node, ranks in ranks_by_node.items():
        name = name_ranks(ranks)
        if node:
            name += f" on {node}"
        names.append(name)
    return ", ".join(names)


@dataclass(frozen=True)
class RankProcess:
    """How the process of one rank ended, and what it left besides its log.

    Attributes:
        code: The exit code; negative for signals, None where unknown.
        ended_by_us: Whether it was killed at the time limit, or because it outlived another rank's
            failure.
        ended_at: When the agent saw that it was gone, None where it did not.
        output: The last lines of its output.
        stack: The stacks that it wrote when it was asked to.
        record: What torch's flight recorder held, as the rank wrote it.
        node: The name of its node in a run of several.
        lost: Why its node is gone; empty while it is there.
        no_space: Why it could not write a report; empty if its directory has room for one, or it
            needed none.
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

    That is what each rank logged, and how its process ended. Nothing is changed, and nothing else
    read. ``ended_since`` is when the first rank was killed by us, ``first`` the rank that the agent
    saw fail first, ``oom_kills`` what ``deaths.out_of_memory_kills`` returned after the run;
    ``more`` are further fields of the ``Ending``.
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
        # They wait for a rank that left its test as the test allows.
        timed_out = False
        for number, end in enumerate(ends):
            if end.status == "stuck":
                ends[number] = replace(end, status="stopped", message=_LEFT_WAITING)
    gone_since: dict[int, float] = {}
    for rank, logged in events.items():
        gone_since[rank] = min(_gone_since(logged), ended_since)
    folded = _fold(ends, first, gone_since)
    return Ending(tuple(folded), events, timed_out=timed_out, **more)


def _with_times_of_death(
    ends: Sequence[RankEnd], processes: Mapping[int, RankProcess]
) -> list[RankEnd]:
    """Return the ends, with the time of death of ranks that could not report.

    It is the time at which the agent saw them gone. The agent stops looking once it has seen a rank
    gone: a rank that died unseen did so at that time or later.
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
    """Tell whether ranks hang, and each of them waits for other ranks."""
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
        allows_waiting: Whether a rank left its test as the test allows, and waited for the others.
        other_failed_first: Whether the agent had seen another rank fail before it ended this one.
        oom_kills: How many processes the kernel had killed for lack of memory after the run.
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
        """What it was at, as the end of a sentence; empty if unknown."""
        if self.done:
            return " after it had finished its work"
        action = current_action(self.events)
        if action is None:
            return ""
        return f" during {action.action!r}"

    @property
    def exception(self) -> Raised | None:
        """The exception with which it ended; None if it ended in another way."""
        exceptions: list[Raised] = []
        if self._waited_for_others():
            exceptions += of_kind(Excused, self.events)
        if not exceptions and not self.hung:
            exceptions += of_kind(Error, self.events)
        return exceptions[-1] if exceptions else None

    def _waited_for_others(self) -> bool:
        """Tell whether it was ended while it waited for the others.

        We may have ended it or, even when it was through itself, the agent.
        """
        by_agent = self.process.code == -signal.SIGTERM
        if is_excused(self.events):
            return self.process.ended_by_us or by_agent or self.process.code is None
        return self.done and self.other_failed_first and by_agent


def _rank_end(rank: int, evidence: _Evidence) -> RankEnd:
    """Return how one rank ended, the surest sign first."""
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
        return replace(end, status="killed", message=f"{_LOST}{process.lost}")
    # At the time limit, or when another rank gave up waiting for this one.
    end = replace(end, stack=process.stack)
    if evidence.hung:
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
    """Return the end of a rank by an exception."""
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
    """Return the end of a rank that reported nothing and that nobody here killed."""
    code = evidence.process.code
    reason = ""
    if evidence.process.no_space:
        reason = f": {evidence.process.no_space}"
    starts = of_kind(Start, evidence.events)
    if not starts:
        ending = f" ({exit_name(code)})" if code else ""
        return replace(end, status="missing", message=f"never started{ending}{reason}")
    if code is None:
        message = f"ended without a report{evidence.when}{reason}"
        return replace(end, status="exited", message=message)
    if code >= 0:
        message = f"exited with code {code} without a report{evidence.when}{reason}"
        return replace(end, status="exited", message=message)
    kills_before = starts[0].oom_kills
    kills_meanwhile = None
    if kills_before is not None:
        kills_meanwhile = evidence.oom_kills - kills_before
    lines = deaths.explain(-code, kills_meanwhile, _last_memory(evidence.events))
    message = f"was killed by {exit_name(code)}{evidence.when}"
    return replace(end, status="killed", message=message, text="\n".join(lines))


def _last_memory(events: Sequence[Event]) -> int:
    """Return the resident memory that a rank reported last, in bytes; 0 if it reported none."""
    for event in reversed(events):
        if event.memory:
            return event.memory
    return 0


def current_action(events: Sequence[Event]) -> Action | None:
    """Return the action that a rank has begun and not finished."""
    current: Action | None = None
    for event in events:
        if isinstance(event, Action):
            current = event
        elif isinstance(event, SnapshotTaken):
            current = None
    return current


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
    """Return the time before which no other rank can have lost this one.

    While it is excused it keeps its connections.
    """
    excused = False
    for event in events:
        if excused:
            # It has left the wait, and its connections with it.
            return event.time
        excused = isinstance(event, Excused)
    return math.inf if excused else -math.inf


def _fold(
    ends: Sequence[RankEnd], first: int | None, gone_since: Mapping[int, float]
) -> list[RankEnd]:
    """Mark as consequence what another rank's end explains; what nothing explains stays a cause.

    Args:
        ends: How each rank ended.
        first: The rank that the agent saw fail first; None if it saw none.
        gone_since: By rank, the time before which no other rank can have lost it.
    """
    ends = _without_late_leavers(ends)
    roots = []
    for end in ends:
        if end.status not in {"done", "stopped"} and not _consequence(end, first):
            roots.append(end)
    if not roots:
        return _fold_without_cause(ends, first)
    folded = []
    for end in ends:
        consequence = _consequence(end, first)
        was_cut = isinstance(end.last, Raised) and end.last.cut
        if consequence == "lost peer" and not was_cut:
            # It can only have lost a rank that was gone by then.
            explained = any(end.time >= gone_since[root.rank] for root in roots)
        else:
            explained = consequence != ""
        if explained:
            folded.append(replace(end, status=consequence))
        else:
            folded.append(end)
    return folded


def _consequence(end: RankEnd, first: int | None) -> str:
    """Return the status of a rank that ended because another one did.

    It is empty if the rank's end may be a cause.
    """
    if end.status == "raised" and end.lost:
        return "lost peer"
    if end.message.startswith(_LOST):
        # Whatever the reason names: SIGTERM, say.
        return ""
    # The agent ends the other ranks by SIGTERM once one has failed; that one may have got its
    # SIGTERM elsewhere.
    by_sigterm = end.status in {"killed", "missing"} and "SIGTERM" in end.message
    if by_sigterm and end.rank != first:
        return "stopped"
    # gloo throws in a thread of its own, where nothing catches it: abort() in a rank whose peer
    # went away.
    by_abort = end.status == "killed" and "SIGABRT" in end.message
    if by_abort and aborted_by_lost_peer(end.output):
        return "lost peer"
    return ""


def _without_late_leavers(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Return the ends, without hangs of ranks that had done their work.

    Where ranks at work hang, these others did not: torchrun keeps them until all are done.
    """
    hanging = [end for end in ends if end.status == "stuck"]
    if all(isinstance(end.last, Done) for end in hanging):
        return list(ends)
    without_late = []
    for end in ends:
        if end.status == "stuck" and isinstance(end.last, Done):
            without_late.append(replace(end, status="done"))
        else:
            without_late.append(end)
    return without_late


def _fold_without_cause(ends: Sequence[RankEnd], first: int | None) -> list[RankEnd]:
    """Return the ends of ranks each of which is another's consequence.

    A rank that raised is nearer to the cause than those that were ended. One that lost a peer
    needed those that had finished, also those that the agent ended while they were leaving.
    """
    any_raised = any(end.status == "raised" for end in ends)
    finished = [end.rank for end in ends if isinstance(end.last, Done)]
    folded = []
    for end in ends:
        consequence = _consequence(end, first)
        if consequence == "stopped" and any_raised:
            folded.append(replace(end, status="stopped"))
        elif consequence == "lost peer" and finished:
            message = f"needed {name_ranks(finished)}, which had finished: it {end.message}"
            folded.append(replace(end, message=message))
        else:
            folded.append(end)
    return folded
