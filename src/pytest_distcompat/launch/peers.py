"""Tells an exception that only says that another rank is gone from one that is a cause."""

from __future__ import annotations

import re

_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Socket closed|"
    r"remote process exited|recvValue failed|sendBytes failed|failed to recv|Socket Timeout|DistNetworkError|"
    r"NCCL communicator was aborted|connectFullMesh failed|wait timeout after|Application timeout caused pair closure",
    re.IGNORECASE,
)
#: What Python's own sockets and pipes raise: not how torch's ranks reach each other.
_OWN = re.compile(r"(?:raised )?(?:failed(?: in \w+)?: )?(?:Connection\w+Error|BrokenPipeError)\b")


def lost_peer(message: str, traceback: str = "") -> bool:
    """Whether all that went wrong, as an exception or a rank's last output says, is that another rank is gone."""
    if _OWN.match(message):
        return False
    return _LOST_PEER.search(f"{message}\n{_without_source(traceback)}") is not None


def _without_source(text: str) -> str:
    """What the exceptions of a traceback say: of pytest's lines those marked ``E``, of Python's those that are not indented.

    The test's own source beside them may hold any words.
    """
    lines = text.splitlines()
    marked = [line for line in lines if line.startswith("E ")]
    return "\n".join(marked or [line for line in lines if not line.startswith(" ")])
