"""Not collected here: test_hanging.py copies it and runs it on real ranks; in every test but the first a rank hangs."""

from __future__ import annotations

import atexit
import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.faults_group import LAST_BUT_ONE, SIZE, meet, test_well

LIMIT = 2.0
two = pytest.mark.distcompat(world_size=SIZE or 2, timeout=LIMIT)
four = pytest.mark.distcompat(world_size=SIZE or 4, timeout=LIMIT)


def fall_asleep() -> None:
    time.sleep(600)


def loop() -> None:
    number = 0
    while number >= 0:
        number += 1


def hold_the_lock() -> None:
    # Twice, in C, the interpreter's own lock not released: no other thread of Python runs, and no Python signal handler.
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    with lock:
        pass


@four
def test_each_elsewhere(rank: int, process_group: Any) -> None:
    # Of 2 ranks the last two of these.
    (fall_asleep, loop, hold_the_lock, meet)[rank + 2 - LAST_BUT_ONE]()


@two
def test_one_asleep_the_other_done(rank: int) -> None:
    if rank == 1:
        fall_asleep()


@two
def test_deaf(rank: int, process_group: Any) -> None:
    if rank == 1:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        wait_for_a_lock()
    meet()


@two
def test_deaf_and_alone(rank: int) -> None:
    if rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    fall_asleep()


@four
def test_nobody_joins(rank: int, process_group: Any) -> None:
    if rank == LAST_BUT_ONE:
        meet()


@two
def test_nobody_joins_with_a_number(rank: int, process_group: Any) -> None:
    import torch
    from torch import distributed

    # A loss, say. It looks like the collective by which ranks that live on see that their group is sound.
    if rank == 1:
        distributed.all_reduce(torch.ones(()))


@two
def test_another_collective(rank: int, process_group: Any) -> None:
    import torch
    from torch import distributed

    if rank == 1:
        distributed.broadcast_object_list([None], src=0)
        distributed.recv(torch.ones(3), src=0)
    else:
        meet()


@two
def test_another_order_of_groups(rank: int, process_group: Any) -> None:
    import torch
    from torch import distributed

    first, second = distributed.new_group(), distributed.new_group()
    for group in (second, first) if rank == 1 else (first, second):
        distributed.all_reduce(torch.ones(2), group=group)


@two
def test_other_tensors(rank: int, process_group: Any) -> None:
    import torch
    from torch import distributed

    # As many bytes: gloo does not notice.
    distributed.all_reduce(torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32))
    if rank == 1:
        fall_asleep()
    meet()


@four
def test_objects(rank: int, process_group: Any) -> None:
    from torch import distributed

    if rank == LAST_BUT_ONE:
        loop()
    distributed.all_gather_object([None] * distributed.get_world_size(), "object")


@two
def test_receiver(rank: int, process_group: Any) -> None:
    import torch
    from torch import distributed

    if rank == 0:
        distributed.recv(torch.ones(3), src=1)
    fall_asleep()


@two
def test_backward(rank: int, process_group: Any) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(1, 4)).sum()
    if rank == 1:
        fall_asleep()
    loss.backward()


@two
def test_unfinished_async_op(rank: int, process_group: Any) -> None:
    import torch
    from torch import distributed

    if rank == 0:
        distributed.all_reduce(torch.ones(2), async_op=True)
    fall_asleep()


@two
def test_another_shape(rank: int, process_group: Any) -> None:
    for _ in range(20):
        meet(2**20 if rank == 1 else 2)
    fall_asleep()


class Slow:
    """A data set that never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        fall_asleep()
        return index


@two
def test_dataloader_workers(rank: int, process_group: Any) -> None:
    from torch.utils.data import DataLoader

    if rank == 1:
        list(DataLoader(Slow(), num_workers=2, multiprocessing_context="fork"))  # type: ignore[arg-type]
    meet()


@two
def test_import(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_there.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    if rank == 1:
        __import__("never_there")


@pytest.fixture
def hangs_up(rank: int) -> None:
    if rank == 1:
        fall_asleep()


@pytest.fixture
def hangs_down(rank: int) -> Iterator[None]:
    yield
    if rank == 1:
        fall_asleep()


@two
def test_setup(hangs_up: None, process_group: Any) -> None:
    pass


@two
def test_teardown(hangs_down: None) -> None:
    pass


@two
def test_the_group_is_destroyed_by_one(rank: int, process_group: Any) -> None:
    from torch import distributed

    if rank == 1:
        distributed.barrier()


@two
def test_thread_at_exit(rank: int) -> None:
    if rank == 1:
        threading.Thread(target=fall_asleep).start()


@two
def test_finalizer_at_exit(rank: int) -> None:
    import multiprocessing.util

    if rank == 1:
        multiprocessing.util.Finalize(None, fall_asleep, exitpriority=1)


@two
def test_atexit_on_all(rank: int) -> None:
    atexit.register(fall_asleep)
    threading.Thread(target=fall_asleep).start()


@two
def test_raises_while_the_other_hangs(rank: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    hold_the_lock()


test_well_after_all = test_well
