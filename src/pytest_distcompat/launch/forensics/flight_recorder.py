"""Let a rank write torch's flight recorder to a file when the parent sends a signal.

The flight recorder is a ring of the last collectives of a process. torch starts it by itself
(``TORCH_FR_BUFFER_SIZE``, 2000 entries by default); gloo and NCCL fill it. Each rank calls
``install_handler`` when it starts (``rank``). When ranks hang, the watchdog sends them
``RECORDER_SIGNAL`` and reads ``rank-1.recorder``, a line of JSON for each recorder:
``{"entries": [{"profiling_name": "gloo:all_reduce", "input_sizes": [[4]], ...}]}``.
``collectives.read_record`` decodes it for the report.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
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

#: Makes a rank write what its flight recorder holds. A real-time signal, because programs do not
#: use those.
RECORDER_SIGNAL = signal.SIGRTMIN + 8

#: The line that marks the end of the file: by it the parent sees that the rank has written all.
END = b"{}\n"

#: The handler in use: the C library holds only its address, so Python must keep it alive.
_installed_handlers: list[Any] = []


def record_file(directory: str | Path, rank: int) -> Path:
    """Return the file to which that rank writes: a line of JSON for each recorder, then ``END``."""
    return Path(directory) / f"rank-{rank}.recorder"


def install_handler(directory: str | Path, rank: int) -> None:
    """Write the flight recorder whenever ``RECORDER_SIGNAL`` comes from now on.

    Nothing is done where that is impossible.

    The handler is one of the C library, set by ``ctypes``. A handler of Python's would wait for the
    main thread, which hangs in C. A thread of our own would be seen by tests, cause a warning at
    each fork (Python 3.12), and not run while another thread holds the GIL.

    The C library calls the handler in the midst of what the main thread does, with or without the
    GIL. In rare cases that goes wrong, which does not matter: the parent either kills this process
    at once thereafter, and has its Python stacks already, or the process sleeps in C without the
    GIL.
    """
    with contextlib.suppress(OSError, MemoryError, AttributeError):
        # Set below, before the handler is installed.
        file = -1

        def write_record(_signal: int) -> None:
            _write(file)

        make_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
        handler = make_handler(write_record)
        # The file is opened now because at the time of a hang this process may be unable to open
        # one. The parent takes the file as a sign that there is a handler: without a handler the
        # signal would end this process. So what may fail, to make the handler, comes first.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(record_file(directory, rank), flags, 0o644)
        ctypes.CDLL(None).signal(int(RECORDER_SIGNAL), handler)
        _installed_handlers[:] = [handler]


def _write(file: int) -> None:
    """Write what all recorders hold to a file that is open."""
    with contextlib.suppress(Exception):
        for dump in dumps():
            os.write(file, dump().strip() + b"\n")
        os.write(file, END)


def dumps() -> list[Callable[[], bytes]]:
    """Return the functions that dump the recorders as JSON.

    One is for NCCL, if torch has it, and one for the other backends. Both are private to torch;
    ``tests/faults/test_private_names.py`` fails when they move. They are the only way to a dump
    that needs no time limit of NCCL's. They are fit for a process that hangs: they take no stacks.
    The list is empty if torch is not imported or has none.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    of_all_recorders = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(module, name, None)
        if dump is not None:
            of_all_recorders.append(dump)
    return of_all_recorders
