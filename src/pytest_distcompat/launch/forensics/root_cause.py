"""Tell the rank that failed first from ranks that only failed because of it.

When one rank fails, the others fail too: their collectives report a closed connection, or the agent
(torchrun's process that starts and watches ranks) ends them by SIGTERM. ``fold`` marks these ends
as consequences. ``conclude`` calls it last, with the end of each rank.

For example, rank 1 is killed by SIGSEGV, then rank 0 raises "Connection closed by peer". The ends
that come in have the statuses ``raised`` (rank 0) and ``killed`` (rank 1). The ends that go out
have ``lost peer`` and ``killed``, so the report shows rank 1 as the cause.

An end that comes in is ``done``, ``raised`` (it logged an exception), ``killed`` (by a signal),
``exited`` (with a code), ``stuck`` (it still ran at the time limit) or ``missing`` (it never logged
anything). ``lost peer`` and ``stopped`` (ended because another rank had failed) are consequences.
``RankEnd.last`` is the last event that the rank logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_distcompat.events import Done, Event, Excused, Raised
from pytest_distcompat.launch.forensics.ending import RankEnd, name_ranks
from pytest_distcompat.launch.peers import aborted_by_lost_peer

#: How the message about a rank begins whose node, a machine of the run, is gone.
LOST_WITH_NODE = "was lost with its node: "


def gone_since(events: Sequence[Event]) -> float:
    """Return the time before which no other rank can have lost its connection to this one.

    It is unknown (minus infinity) for most ranks. But a rank that skipped its test logs ``Excused``
    and then waits, with its connections open, until the other ranks have ended. So the time is that
    of its next event, and infinity if it has logged none.
    """
    excused = False
    for event in events:
        if excused:
            # The rank has stopped waiting, and its connections may be closed from now on.
            return event.time
        excused = isinstance(event, Excused)
    return math.inf if excused else -math.inf


def fold(
    ends: Sequence[RankEnd], first: int | None, gone_since_by_rank: Mapping[int, float]
) -> list[RankEnd]:
    """Return the ends with a status that marks those which another rank's end explains.

    An end that nothing explains stays as it is: it is a cause.

    Args:
        ends: How each rank ended.
        first: The rank that the agent saw fail first; None if it saw none.
        gone_since_by_rank: By rank, the time before which no other rank can have lost it.
    """
    ends = _without_late_leavers(ends)
    #: The ends that are no consequence of another one.
    roots = []
    for end in ends:
        if end.status not in {"done", "stopped"} and not _consequence(end, first):
            roots.append(end)
    if not roots:
        return _fold_without_cause(ends, first)
    folded = []
    for end in ends:
        consequence = _consequence(end, first)
        # This package cut the connections of such a rank, to make it finish. It lost no rank that
        # was gone.
        was_cut = isinstance(end.last, Raised) and end.last.cut
        if consequence == "lost peer" and not was_cut:
            # It can only have lost a rank that was gone by then.
            explained = any(end.time >= gone_since_by_rank[root.rank] for root in roots)
        else:
            explained = consequence != ""
        if explained:
            folded.append(replace(end, status=consequence))
        else:
            folded.append(end)
    return folded


def _consequence(end: RankEnd, first: int | None) -> str:
    """Return ``lost peer`` or ``stopped`` for a rank that may have ended because another one did.

    Return an empty text if the rank's end may be a cause.
    """
    if end.status == "raised" and end.lost:
        return "lost peer"
    if end.message.startswith(LOST_WITH_NODE):
        # The loss of a machine is a cause. The rest of the message may name SIGTERM, which the
        # lines below must not take for the agent's.
        return ""
    # Once a rank has failed, the agent ends the other ranks by SIGTERM. The rank that failed first
    # was not ended by the agent: if SIGTERM killed it, another process sent the signal.
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
    """Return the ends, with the status ``done`` for stuck ranks that had done their work.

    torchrun keeps ranks that are done until all are. So at the time limit they are still running,
    and only the other stuck ranks hang. If all stuck ranks were done, they hang while they leave,
    and nothing is changed.
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
    """Return the ends of a run in which each failed rank looks like a consequence.

    Two rules choose what to show as the cause. A rank that raised "Connection closed by peer" is
    nearer to the cause than ranks that were ended by SIGTERM, so only the latter are marked. And
    where some rank had finished its work, a rank that lost a peer needed that one: its message says
    so (a rank that took one step more than the others, say).
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
