"""The rank's side of a hang's report: torch's flight recorder, written to a file when the parent asks by a signal.

The recorder is a ring of the last collectives of this process, begun by itself (``TORCH_FR_BUFFER_SIZE``, 2000 of them by
default); gloo and NCCL fill it. https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Makes a rank write what its flight recorder holds. A real-time signal: programs leave those alone.
RECORDER_SIGNAL = signal.SIGRTMIN + 8

#: The line after the last one: all is written.
END = b"{}\n"

#: Kept, for the C library holds its address only.
_kept: list[Any] = []


def record_file(directory: str | Path, rank: int) -> Path:
    """Where that rank writes: a line of JSON for each recorder, then ``END``."""
    return Path(directory) / f"rank-{rank}.recorder"


def answer(directory: str | Path, rank: int) -> None:
    """From now on write the flight recorder whenever ``RECORDER_SIGNAL`` comes. Where that cannot be had, do nothing.

    A handler of Python's would wait for the main thread, which hangs in C; a thread of our own would be one that the tests
    see, warn of at each fork (Python 3.12), and that gets nothing while another holds the GIL. So the C library calls us
    in the midst of what the main thread does, with or without the GIL. That may go wrong in rare cases, which does not
    matter: whoever asks kills this process at once thereafter, and has its Python stacks already; or it sleeps in C, without
    the GIL.
    """
    with contextlib.suppress(OSError, MemoryError, AttributeError):
        file = -1
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _write(file))
        # Open from now on, for when it is needed this process may be unable to open one; and only now, for whoever sees
        # the file takes it that there is a handler.
        file = os.open(
            record_file(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        ctypes.CDLL(None).signal(int(RECORDER_SIGNAL), handler)
        _kept[:] = [handler]


def _write(file: int) -> None:
    with contextlib.suppress(Exception):
        for dump in dumps():
            os.write(file, dump().strip() + b"\n")
        os.write(file, END)


def dumps() -> list[Callable[[], bytes]]:
    """What gives the recorders' contents as JSON: one for NCCL, in a torch that has it, and one for all other back ends.

    Both are private to torch, the only way to a recorder that no time limit of NCCL's has run into, and fit for a process
    that hangs: they take no stacks. ``tests/faults/test_private_names.py`` says when they move. None, if torch is not
    imported or has none.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    found = (getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    return [dump for dump in found if dump is not None]
