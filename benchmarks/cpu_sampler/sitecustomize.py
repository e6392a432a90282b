"""Sample the main thread's stack every 5 ms of CPU time. Python imports this in each process that starts."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NoReturn

#: The interval of samples in seconds of CPU time, of all threads.
_EVERY = 0.005
_stacks: Counter[str] = Counter()
_began = 0.0


def _sample(_signal: int, frame: FrameType | None) -> None:
    functions = []
    while frame is not None:
        functions.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    _stacks[";".join(reversed(functions))] += 1


def _start() -> None:
    global _began  # noqa: PLW0603 - a forked process begins anew
    _stacks.clear()
    _began = time.process_time()
    signal.signal(signal.SIGPROF, _sample)
    # Libraries in C may not expect that a signal interrupts a system call.
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, _EVERY, _EVERY)


def _write() -> None:
    """Write what this process did so far; it may be killed later."""
    found = {"seconds": time.process_time() - _began, "command": sys.orig_argv, "stacks": _stacks}
    (Path(os.environ["CPU_SAMPLES"]) / f"{os.getpid()}.json").write_text(
        json.dumps(found), encoding="utf-8"
    )


def _exit(status: int) -> NoReturn:
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write()
    _os_exit(status)


if "CPU_SAMPLES" in os.environ:
    _start()
    os.register_at_fork(before=_write, after_in_child=_start)
    atexit.register(_write)
    _os_exit = os._exit
    os._exit = _exit
