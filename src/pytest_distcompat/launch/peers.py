"""Tell an exception that only says that another rank is gone from one that is a cause.

A rank decides it, where the exception itself is at hand: a test may raise what it likes, in whatever words.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from types import TracebackType

_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Socket closed|"
    r"remote process exited|recvValue failed|sendBytes failed|failed to recv|Socket Timeout|DistNetworkError|"
    r"NCCL communicator was aborted|connectFullMesh failed|wait timeout after|Application timeout caused pair closure",
    re.IGNORECASE,
)
#: Where torch's Python is that reaches other ranks, and the place in its C++ code that gloo's exceptions begin with.
_MODULE, _GLOO = "torch.distributed", re.compile(r"\bgloo/")


def lost_peer(error: BaseException | None) -> bool:
    """Return whether that exception, or one that led to it, is how torch.distributed tells that another rank is gone."""
    return any(
        _of_torch(one) and _LOST_PEER.search(f"{type(one).__name__}: {one}") is not None for one in _chain(error)
    )


def aborted_by_lost_peer(output: str) -> bool:
    """Return whether a rank that aborted wrote that a C++ thread of its did so for a lost peer.

    gloo throws in a thread of its own, where nobody can catch it.
    """
    _, _, said = output.partition("terminate called")
    return _LOST_PEER.search(said) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and those that it was raised from, or while they were handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _of_torch(error: BaseException) -> bool:
    """Return whether torch.distributed raised it: in its Python code, or in C++ code that some line called."""
    own_type = isinstance(error, RuntimeError) and type(error).__module__ == _MODULE
    trace = error.__traceback__
    if trace is None or not (own_type or type(error) is RuntimeError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    if f"{trace.tb_frame.f_globals.get('__name__')}.".startswith(f"{_MODULE}."):
        return True
    return not _by_statement(trace) and (own_type or _GLOO.search(str(error)) is not None)


def _by_statement(trace: TracebackType) -> bool:
    """Return whether a ``raise`` (or an ``assert``) of that frame raised the exception, and not what the frame called."""
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
