"""How a run ended, from what its ranks wrote and how their processes went: never weaker than the worst rank.

The rank that failed first is the cause and is shown first; ranks that only lost their peer, or were ended because of
it, are folded under it.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_distcompat.excerpt import encodable
from pytest_distcompat.launch import builds
from pytest_distcompat.launch.collectives import Standing, parting, standing, told
from pytest_distcompat.launch.files import Files
from pytest_distcompat.launch.peers import aborted_by_lost_peer
from pytest_distcompat.launch.request import EXCUSED, is_excused, read_events
from pytest_distcompat.launch.stacks import threads, without_launcher

#: What is said of a rank that waited for one which had left its test.
_WAITED = "waited for ranks that had left the test, and was killed"


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``status``: ``done``; ``raised`` (it reported an exception); ``excused`` (the same of one that its test allows);
    ``killed`` and ``exited`` (it could not report);
    ``stuck`` (the time limit found it running); ``lost peer`` and ``stopped`` (consequences of another rank's end);
    ``missing`` (it never started). A rank that is stuck has a ``stack`` and, made of that, a ``standing``;
    one that others gave up waiting for has the ``stack``. ``lost``: what it raised only says that another rank is gone.
    """

    rank: int
    status: str
    message: str = ""
    text: str = ""
    kind: str = ""
    time: float = 0.0
    stack: str = ""
    standing: Standing | None = None
    output: str = ""
    lost: bool = False
    last: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How all ranks of a run ended, and what each wrote.

    ``left`` says why ranks that were kept left early; ``leaks`` what stayed in use of the devices after the ranks were gone:
    a failure, however they ended. ``builds`` says whom ranks waited for that were to build an extension.
    """

    ranks: tuple[RankEnd, ...]
    events: Mapping[int, Sequence[Mapping[str, Any]]]
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

    @property
    def failed(self) -> bool:
        """Whether anything at all went wrong."""
        return bool(self.leaks) or self._ranks_failed

    @property
    def _ranks_failed(self) -> bool:
        return bool(self.launch_error) or self.timed_out or any(end.status != "done" for end in self.ranks)

    @property
    def kind(self) -> str:
        """``ok``, ``raised``, ``leaked``, ``hung`` or ``crashed``: the worst that happened to any rank, first or not.

        An exception can be an expected one; a leak, a crash and a hang beside it cannot.
        """
        statuses = {end.status for end in self.ranks} - {"done"}
        if self.launch_error or statuses & {"killed", "exited", "missing"}:
            return "crashed"
        if self.timed_out:
            return "hung"
        if statuses and not statuses & {"raised", "excused", "lost peer"}:
            # "stopped" alone: nobody is left to have been the cause, which no exception explains.
            return "crashed"
        return "leaked" if self.leaks else "raised" if statuses else "ok"

    @property
    def cause(self) -> RankEnd | None:
        """The rank that failed first."""
        ordered = self.in_order()
        return ordered[0] if ordered else None

    def in_order(self) -> list[RankEnd]:
        """The ranks that did not end well: causes by time, then those that hang, then what is allowed, then mere consequences.

        Of those that hang the ones that wait for others come last.
        """
        order = ({"raised", "killed", "exited"}, {"missing"}, {"stuck"}, {"excused"}, {"lost peer"}, {"stopped"})
        weight = {status: number for number, statuses in enumerate(order) for status in statuses}
        bad = [end for end in self.ranks if end.status != "done"]
        waits = {end.rank: end.standing is not None and bool(end.standing.waits) for end in bad}
        return sorted(bad, key=lambda end: (weight[end.status], waits[end.rank], end.time, end.rank))

    def headline(self) -> str:
        """One line: which rank, what happened; what is left where, if all ranks ended well."""
        if self.leaks and not self._ranks_failed:
            return "; ".join(self.leaks)
        if self.launch_error:
            what = self.launch_error.strip().splitlines()[-1]
            return what if any(self.events.values()) else f"the ranks could not be started: {what}"
        cause = self.cause
        if cause is None:
            late = f"time limit of {self.timeout:g} s passed while the ranks were leaving, all of them done"
            return late if self.timed_out else "all ranks ended well"
        if self.timed_out and cause.status == "stuck":
            what, _ = parting(self._standings)
            return ": ".join(
                filter(None, (f"time limit of {self.timeout:g} s", what, told(self._standings), self.builds))
            )
        return f"rank {cause.rank} {cause.message}"

    @property
    def _standings(self) -> dict[int, Standing | None]:
        return {end.rank: end.standing for end in self.ranks if end.status == "stuck"}

    def text(self) -> str:
        """The whole story, first cause first; a leak comes last, for it was seen last."""
        if self.leaks and not self._ranks_failed:
            return "\n\n".join(self.leaks)
        _, where_they_part = parting(self._standings)
        parts = [self.headline(), *([where_they_part] if where_they_part else [])]
        if self.launch_error:
            parts.append(self.launch_error)
        ordered = self.in_order()
        for end in ordered:
            if end.status in {"lost peer", "stopped"}:
                continue
            parts.append(_section(end))
        folded = [end for end in ordered if end.status in {"lost peer", "stopped"}]
        if folded:
            parts.append(
                "consequences:\n" + "\n".join(f"  rank {end.rank} {_first_line(end.message)}" for end in folded)
            )
            parts += [
                f"where rank {end.rank} was when another one gave up waiting (most recent call first):\n{shown}"
                for end in folded
                if (shown := without_launcher(end.stack))
            ]
        if self.left_over:
            parts.append("left running by a rank, now killed: " + ", ".join(self.left_over))
        return "\n\n".join([*(part.rstrip() for part in parts), *self.leaks])


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _section(end: RankEnd) -> str:
    lines = [f"--- rank {end.rank}: {_first_line(end.message)} ---"]
    if end.text:
        lines.append(end.text.rstrip())
    if end.standing is not None and end.standing.recorded:
        lines.append(end.standing.history())
    if end.stack and end.status == "stuck":
        lines.append("Python stack at the time limit (most recent call first):\n" + without_launcher(end.stack))
    if end.output and end.status in {"killed", "exited", "stuck", "missing"}:
        lines.append("last output:\n" + end.output.rstrip())
    return "\n".join(lines)


def conclude(
    directory: str | Path,
    world_size: int,
    exit_codes: Sequence[int | None] | None,
    *,
    timed_out: bool = False,
    ended_by_us: Sequence[int] = (),
    ended_since: float = math.inf,
    first: int | None = None,
    ended_at: Sequence[float | None] = (),
    files: Files | None = None,
    environment: Mapping[str, str] = os.environ,
    **more: Any,
) -> Ending:
    """Put together what is known of each rank, from its log in ``directory`` and from its ``files``, if they lie elsewhere.

    ``exit_codes`` are negative for signals, None where unknown; ``ended_by_us`` the ranks killed at the time limit, or
    because they outlived another rank's failure, all ``ended_since`` that time; ``first`` the rank that the agent saw fail
    first. ``environment`` is what ranks had. Locks of builds that they left are removed.
    """
    files = files or Files.of(directory)
    events = {rank: read_events(directory, rank) for rank in range(world_size)}
    codes = list(exit_codes or [None] * world_size)
    ended = "stuck" if timed_out else "stopped"
    waited = any(map(is_excused, events.values()))
    ends = [
        _rank_end(files, rank, events[rank], codes[rank], ended=ended if rank in ended_by_us else "", waited=waited)
        for rank in range(world_size)
    ]
    died = {rank: time for rank, time in enumerate(ended_at) if time is not None}
    # The agent looks no more once it has seen a rank gone: whoever died unseen did so at that time or later.
    last = max(died.values(), default=0.0)
    ends = [
        replace(end, time=died.get(end.rank, max(end.time, last))) if end.status in {"killed", "exited"} else end
        for end in ends
    ]
    stuck = [end for end in ends if end.status == "stuck"]
    if stuck and waited and all(end.standing and end.standing.waiting for end in stuck):
        # For a rank whose test allows that it left.
        timed_out = False
        ends = [replace(end, status="stopped", message=_WAITED) if end in stuck else end for end in ends]
    gone_since = {rank: min(_gone_since(events[rank]), ended_since) for rank in events}
    ending = Ending(tuple(_fold(ends, first, gone_since)), events, timed_out=timed_out, **more)
    if not ending.failed:
        return ending
    builds.remove_abandoned(ending.seconds, environment)
    waited_for = any(builds.waits(frames) for end in stuck for frames in threads(end.stack))
    return replace(ending, builds=builds.told(environment)) if waited_for else ending


def _rank_end(
    files: Files, rank: int, events: Sequence[Mapping[str, Any]], code: int | None, *, ended: str, waited: bool
) -> RankEnd:
    names = {event["event"]: event for event in events}
    last = events[-1] if events else {}
    known: dict[str, Any] = {"rank": rank, "time": float(last.get("time", 0.0)), "last": last}
    known["output"] = files.output(rank)
    # One that waited for the others was ended with them: by us, or by the agent.
    excused = is_excused(events) and (ended or code in {None, -signal.SIGTERM})
    if excused or ("error" in names and ended != "stuck"):
        error = last if excused else names["error"]
        said = {"message": encodable(f"raised {error['message']}"), "text": encodable(error["text"])}
        known |= {**said, "time": error["time"], "kind": error["kind"], "lost": error.get("lost", False)}
        return RankEnd(**known, status="raised")
    if not ended and "done" in names and code in {0, None}:
        return RankEnd(**known, status="done")
    # At the time limit, or when another rank gave up waiting for this one.
    stack = files.stack(rank)
    known["stack"] = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    after = " after it had finished its work" if "done" in names else _where(events)
    if ended == "stopped":
        message = _WAITED if waited else f"outlived another rank's failure and was killed{after}"
        return RankEnd(**known, status="stopped", message=message)
    if ended == "stuck":
        known["standing"] = standing(files.record(rank), known["stack"])
        return RankEnd(**known, status="stuck", message=f"was still running at the time limit{after}")
    if "start" not in names:
        ending = f" ({exit_name(code)})" if code else ""
        return RankEnd(**known, status="missing", message=f"never started{ending}")
    if code is not None and code < 0:
        return RankEnd(**known, status="killed", message=f"was killed by {exit_name(code)}{after}")
    if code is None:
        return RankEnd(**known, status="exited", message=f"ended without a report{after}")
    return RankEnd(**known, status="exited", message=f"exited with code {code} without a report{after}")


def _where(events: Sequence[Mapping[str, Any]]) -> str:
    """The action that a rank was in, where it said so."""
    actions = [event for event in events if event["event"] in {"action", "snapshot"}]
    return f" during {actions[-1]['action']!r}" if actions and actions[-1]["event"] == "action" else ""


def exit_name(code: int | None) -> str:
    """An exit code as people say it."""
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _gone_since(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the time before which no other rank can have lost this one.

    A rank that is excused waits for the others and keeps its connections. Of any other the time is not known so well.
    """
    told = [event["event"] for event in events]
    if EXCUSED not in told:
        return -math.inf
    after = events[told.index(EXCUSED) + 1 :]
    return float(after[0]["time"]) if after else math.inf


def _fold(ends: Sequence[RankEnd], first: int | None, gone_since: Mapping[int, float]) -> list[RankEnd]:
    """Mark as consequence what another rank's end explains; what nothing explains stays a cause."""

    def consequence(end: RankEnd) -> str:
        if end.status == "raised" and end.lost:
            return "lost peer"
        # The agent ends the other ranks by SIGTERM once one has failed; that one may have got its SIGTERM elsewhere.
        if end.status in {"killed", "missing"} and "SIGTERM" in end.message and end.rank != first:
            return "stopped"
        # gloo throws from a thread that nobody catches in: abort() in a rank whose peer went away.
        if end.status == "killed" and "SIGABRT" in end.message and aborted_by_lost_peer(end.output):
            return "lost peer"
        return ""

    working = [end for end in ends if end.status == "stuck" and not _said(end, "done")]
    if working:
        # torchrun keeps ranks that are done until the last one is: those did not hang.
        ends = [replace(end, status="done") if end.status == "stuck" and _said(end, "done") else end for end in ends]

    def explained(end: RankEnd) -> bool:
        if end.last.get("cut") or consequence(end) != "lost peer":
            return True
        return any(end.time >= gone_since[root.rank] for root in roots)

    roots = [end for end in ends if end.status not in {"done", "stopped"} and not consequence(end)]
    if not roots:
        # Each is said to be another's consequence. One that raised is nearer to the cause than those that were ended.
        raised = any(end.status == "raised" for end in ends)
        return [replace(end, status="stopped") if raised and consequence(end) == "stopped" else end for end in ends]
    return [replace(end, status=consequence(end) or end.status) if explained(end) else end for end in ends]


def _said(end: RankEnd, event: str) -> bool:
    return bool(end.last.get("event") == event)
