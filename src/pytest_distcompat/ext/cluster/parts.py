"""The parts of a run that its nodes have: how each ended, and what follows for the whole run.

A run over several *nodes* (machines) has a part on each, its ranks there. When a part has ended,
the node's agent sends a message, the ``Part``. ``NodesRun`` (``run``) collects them, and calls
these functions to make arguments of ``conclude`` from them, which says how the run ended.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_distcompat.ext.cluster.node import Node
from pytest_distcompat.launch.forensics.conclude import RankProcess

#: How a node ended its part of a run, as its agent says it (``agent._part_that_ended``):
#: ``processes`` (rank, as text -> fields of ``RankProcess``: exit code, ...), ``known`` (what the
#: node's watchdog knows, as arguments of ``conclude``), ``leaks``, ``output``. If the node is gone,
#: pytest's process makes a part with ``lost``, the reason.
Part = dict[str, Any]
#: The part of a node whose ranks were never started.
NOT_STARTED: Part = {"processes": {}, "known": {}, "output": {}}


def has_failed(part: Part) -> bool:
    """Tell whether a node's part of the run has ended badly."""
    if "lost" in part or part["known"].get("launch_error"):
        return True
    codes = [process["code"] for process in part["processes"].values()]
    # Without processes no rank was started. A code is 0 for a good end, None if unknown.
    return not codes or any(codes)


def process_of(rank: int, node: Node, part: Part) -> RankProcess:
    """Return how the process of a rank ended, with times by the clock of this machine.

    A node's times are by its own clock, which is ``node.ahead`` seconds ahead of this machine's.
    """
    # For a rank of which the node said nothing.
    lost: dict[str, Any] = {"lost": part.get("lost", "")}
    fields = part["processes"].get(str(rank), lost)
    process = RankProcess(**{**fields, "node": node.name})
    if process.ended_at is not None:
        return dataclasses.replace(process, ended_at=process.ended_at - node.ahead)
    if process.lost:
        return dataclasses.replace(process, ended_at=node.lost_at)
    return process


def known_of_run(
    nodes: Sequence[Node], parts: Mapping[str, Part], timeout: float
) -> dict[str, Any]:
    """Return what the nodes know of how their parts ended, as arguments of ``conclude``.

    A part that a node has no answer for, because it is lost or was never started, does not count.

    Args:
        nodes: The nodes of the run.
        parts: How each ended its part, by the node's name.
        timeout: The time limit of the run, in seconds.
    """
    timed_out = False
    #: The earliest time, by the clock of this machine, at which a node killed ranks.
    ended_since = math.inf
    oom_kills = 0
    #: The rank that failed first, by the first node that knows one.
    first: int | None = None
    left_over: list[str] = []
    notice = ""
    for node in nodes:
        known = parts[node.name]["known"]
        timed_out = timed_out or bool(known.get("timed_out"))
        ended_since = min(ended_since, known.get("ended_since", math.inf) - node.ahead)
        oom_kills = max(oom_kills, known.get("oom_kills", 0))
        if first is None:
            first = known.get("first")
        for process in known.get("left_over", ()):
            left_over.append(f"{process} on {node.name}")
        notice = notice or known.get("notice", "")
    return {
        "timed_out": timed_out,
        "timeout": timeout,
        "ended_since": ended_since,
        "oom_kills": oom_kills,
        "first": first,
        "left_over": tuple(left_over),
        "notice": notice,
    }
