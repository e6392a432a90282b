"""Not collected here: test_dying.py copies it and runs it on real ranks; in every test but the first a process dies."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.faults_group import LAST_BUT_ONE, await_error, four, meet, test_well, two


@two
def test_exits_0_while_the_other_waits(rank: int, process_group: Any) -> None:
    if rank == 1:
        os._exit(0)
    meet()


@two
def test_exits_0_while_the_other_is_done(rank: int) -> None:
    if rank == 1:
        time.sleep(0.2)
        os._exit(0)


@four
def test_exits_0_everywhere(rank: int) -> None:
    os._exit(0)


@two
def test_exits_3(rank: int, process_group: Any) -> None:
    if rank == 1:
        print("words before the end", flush=True)
        os._exit(3)
    meet()


@four
def test_killed(rank: int, process_group: Any) -> None:
    if rank == LAST_BUT_ONE:
        os.kill(os.getpid(), signal.SIGKILL)
    meet()


@two
def test_terminated(rank: int, process_group: Any) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    meet()


def fault_below(frames: int) -> None:
    """As deep as a model's layers are."""
    if frames:
        fault_below(frames - 1)
    ctypes.string_at(0)


@two
def test_segfault_in_c(rank: int, process_group: Any) -> None:
    if rank == 1:
        fault_below(40)
    meet()


@two
def test_abort_in_c(rank: int, process_group: Any) -> None:
    if rank == 1:
        ctypes.CDLL(None).abort()
    meet()


@two
def test_bus_error(rank: int, tmp_path: Path) -> None:
    if rank == 1:
        # What a full /dev/shm does to a process that maps a file there.
        with (tmp_path / "mapped").open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                file.truncate(0)
                mapped[0] = 1
    time.sleep(60)


@two
def test_cpu_limit(rank: int) -> None:
    if rank == 1:
        spent = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + 1, spent + 2))
        while True:
            pass
    time.sleep(60)


@two
def test_address_space(rank: int, process_group: Any) -> None:
    import torch

    if rank == 1:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        torch.ones(2**28)
    meet()


@two
def test_python_memory(rank: int, process_group: Any) -> None:
    if rank == 1:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        bytearray(2**30)
    meet()


@two
def test_out_of_memory(rank: int, process_group: Any) -> None:
    group = Path(os.environ["FAULTS_CGROUP"])
    if rank == 1:
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        bytearray(2**28)
    meet()


@two
def test_in_a_thread(rank: int, process_group: Any) -> None:
    if rank == 1:
        threading.Thread(target=os._exit, args=(0,)).start()
        time.sleep(60)
    meet()


@two
def test_turns_into_a_daemon(rank: int) -> None:
    # The child goes on in the place of the rank, to the end of the test.
    if rank == 1 and os.fork():
        os._exit(0)


@two
def test_turns_into_a_daemon_in_setup(turns_into_a_daemon: None) -> None:
    pass


@pytest.fixture
def turns_into_a_daemon(rank: int) -> None:
    if rank == 1 and os.fork():
        os._exit(0)


@two
def test_its_child_goes_on_too(rank: int) -> None:
    child = os.fork() if rank == 1 else 0
    if child:
        os.waitpid(child, 0)
        os._exit(0)


@pytest.fixture
def dies_up(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def dies_down(rank: int) -> Iterator[None]:
    yield
    if rank == 1:
        os._exit(0)


@two
def test_in_setup(dies_up: None, process_group: Any) -> None:
    meet()


@two
def test_in_teardown(process_group: Any, dies_down: None) -> None:
    meet()


class Crash:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


@two
def test_when_the_interpreter_ends(rank: int) -> None:
    if rank == 1:
        import multiprocessing.util

        multiprocessing.util.Finalize(None, os.kill, (os.getpid(), signal.SIGSEGV), exitpriority=1)


@two
def test_two_die(rank: int, process_group: Any) -> None:
    from torch import distributed

    # At one time: the agent ends whoever is left a few milliseconds after the first, which a busy machine takes longer for.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    when = [time.monotonic() + 0.2]
    distributed.broadcast_object_list(when)
    if rank > 1:
        meet()
    while time.monotonic() < when[0]:
        pass
    if rank == 0:
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


@two
def test_one_dies_after_another_raised(rank: int, shared_dir: Path) -> None:
    if rank == 0:
        raise ValueError("first")
    if rank > 1:
        time.sleep(60)
    # Rank 0 waits a moment for the others' own failures before it leaves and takes them with it.
    await_error(0, shared_dir)
    os.kill(os.getpid(), signal.SIGKILL)


class Killing:
    """A data set whose loading kills the worker process."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


@two
def test_dataloader_worker(rank: int, process_group: Any) -> None:
    from torch.utils.data import DataLoader

    if rank == 1:
        list(DataLoader(Killing(), num_workers=1))  # type: ignore[arg-type]
    meet()


@two
@pytest.mark.xfail(reason="known")
def test_expected_failure(rank: int, process_group: Any) -> None:
    if rank == 1:
        sys.stderr.write("words before the end")
        sys.stderr.flush()
        os.abort()
    meet()


test_well_after_all = test_well
