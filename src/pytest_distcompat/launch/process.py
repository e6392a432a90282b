"""Processes: let them die with their parent, find and kill a tree, tidy up after dead ranks.

Used by pytest's process, by the launcher process and its fork servers (the processes that start
ranks), and by ranks. ``psutil.Process`` objects and process numbers come in and go out; nothing is
kept between calls.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from pytest_distcompat import clock

#: The file exists if this kernel lists children (CONFIG_PROC_CHILDREN).
_CHILDREN_FILE = Path("/proc/thread-self/children")

#: How long processes that tidy up after others may take, in seconds. torch's waits two seconds for
#: another user.
TIDY_TIMEOUT_S = 4.0
#: Such processes, by words in their command lines (``tidies_up``).
_TIDYING_PROCESSES = ("multiprocessing.resource_tracker", "torch_shm_manager")

#: Device files of accelerators: NVIDIA (also Jetson's, and in WSL), AMD, Intel, Ascend, Cambricon,
#: and the kernel's own class.
_ACCELERATORS = (
    "nvidia*",
    "nvhost*",
    "nvmap",
    "dxg",
    "kfd",
    "dri/renderD*",
    "davinci*",
    "cambricon*",
    "accel*",
)

#: Options of prctl(2): the signal that this process gets when its parent dies, and whether orphaned
#: descendants become its children.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even if it is stuck in C.

    That is Linux only; elsewhere nothing happens.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent below this one dies (Linux).

    So what a dead rank leaves running is still a descendant, and can be found and killed.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def do_nothing(number: int, frame: object) -> None:
    """Handle a signal that must not end this process.

    Unlike SIG_IGN, processes that are started do not inherit it.
    """


def on_device(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """Return a copy of the environment for ranks on ``cpu`` or ``cuda``.

    On the CPU no GPU is visible: ``CUDA_VISIBLE_DEVICES`` is empty, and ``DS_ACCELERATOR`` (the
    device that DeepSpeed takes) is ``cpu``. On a machine without a GPU neither is set: code that
    reads it would work on these ranks and fail under torchrun. pytest's own variable
    ``PYTEST_CURRENT_TEST`` is left out. All launchers call this.
    """
    of_ranks = dict(environment)
    of_ranks.pop("PYTEST_CURRENT_TEST", None)
    if device == "cpu" and has_accelerator():
        of_ranks["CUDA_VISIBLE_DEVICES"] = ""
        of_ranks.setdefault("DS_ACCELERATOR", "cpu")
    return of_ranks


def user_environment(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """Return a copy of the environment as the user's own torchrun would pass it on.

    The launcher ``torchrun`` calls it to run a test again without what this plugin adds. Only GPUs
    stay hidden from ranks on the CPU. ``DS_ACCELERATOR`` is the user's own or none: DeepSpeed takes
    the CPU by itself where it sees no GPU.
    """
    of_ranks = on_device(environment, device)
    if "DS_ACCELERATOR" not in environment:
        of_ranks.pop("DS_ACCELERATOR", None)
    return of_ranks


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Tell whether there is a device file of a GPU or of another accelerator.

    No library is asked, because that would load it.
    DeepSpeed prefers each of them to the CPU (deepspeed/accelerator/real_accelerator.py).
    """
    for pattern in _ACCELERATORS:
        if any(devices.glob(pattern)):
            return True
    return False


def _prctl(option: int, value: int) -> None:
    """Call prctl(2), where the C library has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def reap_adopted(keep: Iterable[int]) -> None:
    """Wait for children that are zombies, but for those in ``keep``.

    A process that adopts orphans has to reap them. Children in ``keep`` have an owner that waits
    for them itself, as ``Popen`` does.
    """
    for pid in set(children(os.getpid())) - set(keep):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def alive(pid: int) -> bool:
    """Tell whether that process still runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(pid: int) -> list[int]:
    """Return the children of that process, zombies among them; none of a process that is gone.

    It reads Linux's own lists: psutil reads the parent of every process of the machine, 30 ms where
    a thousand run, as on any machine with many cores.
    https://docs.kernel.org/filesystems/proc.html, 3.7
    """
    if not _CHILDREN_FILE.exists():
        try:
            return [child.pid for child in psutil.Process(pid).children()]
        except psutil.NoSuchProcess:
            return []
    pids: list[int] = []
    with contextlib.suppress(OSError):
        # Each thread has its own children. A thread that ends meanwhile hands them on to another.
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                numbers = (task / "children").read_text(encoding="ascii").split()
                pids += map(int, numbers)
    return pids


def descendants(pid: int) -> list[psutil.Process]:
    """Return all processes below ``pid``, without itself."""
    processes: list[psutil.Process] = []
    parents = [pid]
    while parents:
        for child in children(parents.pop()):
            parents.append(child)
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(child))
    return processes


def kill(processes: Iterable[psutil.Process]) -> list[str]:
    """SIGKILL the processes, and wait until they are gone.

    Return the names of those that were killed, as ``python (pid 4711)``. Zombies count as gone:
    their parents have to reap them. Processes that tidy up after others are left alone: they end by
    themselves when the others are gone.
    """
    doomed = [process for process in processes if not tidies_up(process)]
    names = []
    for process in doomed:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.name()} (pid {process.pid})")
            process.kill()
    await_end(doomed, 2.0)
    return names


def let_tidy_up(processes: Iterable[psutil.Process]) -> None:
    """Wait until processes that tidy up (``tidies_up``) have ended; kill one that does not end.

    The processes that used them are gone by now.
    """
    tidy = list(processes)
    await_end(tidy, TIDY_TIMEOUT_S)
    for process in tidy:
        with contextlib.suppress(psutil.Error):
            process.kill()


def tidies_up(process: psutil.Process) -> bool:
    """Tell whether that process unlinks what its users leave, and ends when they are gone.

    Python's resource tracker does so with semaphores and shared memory, torch's with files of
    ``file_system`` sharing.
    """
    with contextlib.suppress(psutil.Error):
        for argument in process.cmdline():
            if any(name in argument for name in _TIDYING_PROCESSES):
                return True
    return False


def kill_and_wait(process: subprocess.Popen[Any]) -> None:
    """SIGKILL a child of ours and wait for it.

    Not by Popen's own ``kill`` and ``wait``: where Ctrl-C comes just as ``poll`` has taken Popen's
    lock the lock stays taken, and ``wait`` lasts for ever (``_internal_poll`` in
    https://github.com/python/cpython/blob/3.11/Lib/subprocess.py).
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process.pid, signal.SIGKILL)
            _, status = os.waitpid(process.pid, 0)
            # Popen keeps the exit code here, and waits no more for a process that has one.
            process.returncode = os.waitstatus_to_exitcode(status)


def await_exit(process: subprocess.Popen[Any], seconds: float) -> bool:
    """Wait for a child of ours to end; return whether it did.

    Popen's own ``wait`` reads a clock that a test may have frozen.
    """
    return clock.wait_until(lambda: process.poll() is not None, seconds)


def await_end(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until the processes are gone or zombies.

    psutil's own wait would wait for the parents of zombies.
    """
    pids = [process.pid for process in processes]
    clock.wait_until(lambda: not any(map(alive, pids)), seconds)


def run_exit_functions() -> None:
    """Call the ``atexit`` functions of the interpreter, in a process that ends without it.

    The standard library has only a private name for that; ``tests/launch/test_private_names.py``
    fails when it goes away. What a function raises is printed, and has no other effect, as at an
    ordinary end.
    """
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001 - see the docstring
    flush()


def flush() -> None:
    """Write out what Python buffers of this process's output."""
    # A test may have replaced the first two.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]  # None, without a console


def native_threads() -> Counter[str]:
    """Return how many threads of each name this process has, those of C libraries included.

    A thread without a name has the process's name: ``{"python": 3, "jemalloc_bg_thd": 1}``.
    """
    names: Counter[str] = Counter()
    for thread in psutil.Process().threads():
        with contextlib.suppress(OSError):
            file = Path(f"/proc/self/task/{thread.id}/comm")
            name = file.read_text(encoding="utf-8").strip()
            names[name] += 1
    return names


def sweep_shared_memory(ranks: Iterable[int], master_port: int) -> None:
    """Remove what DeepSpeed's CPU collectives leave in /dev/shm.

    They are named ``deepspeed_allreduce_buffer_<uid>_<addr>_<port>_<rank>`` and never unlinked
    (https://github.com/deepspeedai/DeepSpeed, csrc/cpu/comm/shm.cpp). Uid, port and rank make sure
    that they are ours.
    """
    for rank in ranks:
        buffers = f"deepspeed_allreduce_buffer*_{os.getuid()}_*_{master_port}_{rank}"
        for path in Path("/dev/shm").glob(buffers):  # noqa: S108 - that is where they are
            with contextlib.suppress(OSError):
                path.unlink()
