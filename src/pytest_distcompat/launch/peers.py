"""Tell exceptions that only say that another rank is gone from those that are a cause.

When a rank fails, the collectives of the others raise "Connection closed by peer". A rank calls
``lost_peer`` with the exception that ended it, and logs the answer with it (``events.Error.lost``);
``root_cause`` then shows such a rank as a consequence. The rank decides, because it has the
exception object: it can tell an error of torch from one that a test raises in the same words.

A rank that aborts in C++ logs nothing. For it ``root_cause`` calls ``aborted_by_lost_peer`` with
the rank's last output.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from types import TracebackType

#: What torch, gloo and NCCL say when another rank is gone.
_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|"
    r"Socket closed|remote process exited|recvValue failed|sendBytes failed|failed to recv|"
    r"Socket Timeout|DistNetworkError|NCCL communicator was aborted|connectFullMesh failed|"
    r"wait timeout after|Application timeout caused pair closure",
    re.IGNORECASE,
)
#: torch's Python module that communicates with other ranks, and the C++ source file that gloo's
#: exceptions begin with.
_TORCH_MODULE, _GLOO_SOURCE = "torch.distributed", re.compile(r"\bgloo/")


def lost_peer(error: BaseException | None) -> bool:
    """Tell whether an exception came about because another rank is gone.

    It did if torch.distributed raised it, or one that led to it, with a message that says so.
    """
    for cause in _chain(error):
        if _of_torch(cause) and _LOST_PEER.search(f"{type(cause).__name__}: {cause}"):
            return True
    return False


def aborted_by_lost_peer(output: str) -> bool:
    """Tell whether a rank aborted because a C++ thread of it lost a peer.

    ``output`` is what the rank wrote. gloo throws in a thread of its own, where nothing can catch
    it.
    """
    _, _, abort_message = output.partition("terminate called")
    return _LOST_PEER.search(abort_message) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and those that it was raised from, or while they were handled."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        if error.__cause__ is not None or error.__suppress_context__:
            error = error.__cause__
        else:
            error = error.__context__


def _of_torch(error: BaseException) -> bool:
    """Tell whether torch.distributed raised the exception, in its Python code or in C++.

    C++ code leaves no Python frame: the innermost frame is the line that called it, which may be
    anybody's. Then the type must be torch's own (``DistBackendError``), or the message must name a
    source file of gloo, and the line must not be a ``raise`` of the same words.
    """
    own_type = isinstance(error, RuntimeError) and type(error).__module__ == _TORCH_MODULE
    trace = error.__traceback__
    if trace is None or not (own_type or type(error) is RuntimeError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    if f"{trace.tb_frame.f_globals.get('__name__')}.".startswith(f"{_TORCH_MODULE}."):
        return True
    if _raised_by_statement(trace):
        return False
    return own_type or _GLOO_SOURCE.search(str(error)) is not None


def _raised_by_statement(trace: TracebackType) -> bool:
    """Tell whether a ``raise`` or ``assert`` of that frame raised the exception.

    Otherwise a call that the frame made did. The bytecode instruction at which the frame stopped
    tells it.
    """
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
