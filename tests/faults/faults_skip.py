"""Not collected here: test_skipping.py copies it and runs it on real ranks, which do not agree whether to run a test."""

from __future__ import annotations

import os
import signal
import threading
import time
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.faults.faults_group import LAST, LAST_BUT_ONE, SIZE, await_error, four, meet, test_well, two


@two
def test_skip_and_pass(rank: int) -> None:
    if rank == 0:
        pytest.skip("not here")


@four
def test_skip_and_wait(rank: int, process_group: Any) -> None:
    if rank == LAST_BUT_ONE:
        pytest.skip("not here")
    meet()


@two
def test_skip_and_fail(rank: int) -> None:
    if rank != 1:
        pytest.skip("not here")
    time.sleep(0.2)
    raise ValueError("the worst")


@two
def test_fail_and_skip(rank: int) -> None:
    if rank == 1:
        raise ValueError("the worst")
    time.sleep(0.2)
    pytest.skip("not here")


@two
def test_skip_and_die(rank: int) -> None:
    if rank != 1:
        pytest.skip("not here")
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distcompat(world_size=SIZE or 2, timeout=3)
def test_skip_and_hang(rank: int) -> None:
    if rank != 1:
        pytest.skip("not here")
    time.sleep(600)


@two
@pytest.mark.xfail(reason="known")
def test_skip_and_expected_failure(rank: int) -> None:
    if rank == 0:
        pytest.skip("not here")
    raise ValueError


@two
def test_importorskip(rank: int) -> None:
    if rank == 1:
        pytest.importorskip("no_such_module_anywhere")


@pytest.fixture
def skips_on_one(rank: int) -> None:
    if rank == 1:
        pytest.skip("not set up")


@two
def test_in_setup(skips_on_one: None, process_group: Any) -> None:
    meet()


@two
@pytest.mark.skipif("os.environ.get('RANK') == '1'", reason="by rank")
def test_mark_of_one_rank(rank: int) -> None:
    pass


@two
def test_unittest(rank: int) -> None:
    if rank == 1:
        raise unittest.SkipTest("not here")


@four
def test_all_skip_at_last(rank: int) -> None:
    time.sleep(rank * 0.2)
    pytest.skip(f"rank {rank} says so")


@two
def test_reasons_differ(rank: int) -> None:
    pytest.skip(f"rank {rank} says so")


@two
def test_xfail_and_pass(rank: int) -> None:
    if rank == 1:
        pytest.xfail("not yet")


@two
def test_xfail_and_wait(rank: int, process_group: Any) -> None:
    if rank == 1:
        pytest.xfail("not yet")
    meet()


@two
def test_xfail_and_fail(rank: int) -> None:
    if rank == 0:
        pytest.xfail("not yet")
    if rank == 1:
        time.sleep(0.1)
        raise ValueError("another one")


@two
def test_xfail_and_die(rank: int, shared_dir: Path) -> None:
    if rank == 0:
        pytest.xfail("not yet")
    if rank != 1:
        return
    await_error(0, shared_dir)
    os.kill(os.getpid(), signal.SIGKILL)


@two
@pytest.mark.xfail("os.environ.get('RANK') == '0'", reason="by rank", raises=ValueError)
def test_xfail_mark_of_one_rank(rank: int) -> None:
    if rank == 1:
        raise KeyError("not excused here")
    if rank == 0:
        time.sleep(0.05)
        raise ValueError


@two
def test_xfail_added_on_one(rank: int, request: pytest.FixtureRequest) -> None:
    if rank == 0:
        time.sleep(0.05)
        request.applymarker(pytest.mark.xfail(reason="added"))
    if rank < 2:
        raise ValueError(f"on rank {rank}")


#: Longer than a rank that fails waits for the others.
LATE = 0.7


@two
def test_xfail_and_words(rank: int) -> None:
    if rank == 0:
        pytest.xfail("not yet")
    if rank == 1:
        text = "Broken pipe"
        assert text == "x"


@two
def test_xfail_and_refused(rank: int) -> None:
    if rank == 0:
        pytest.xfail("not yet")
    if rank == 1:
        raise RuntimeError("Connection refused")


@two
def test_xfail_and_fail_late(rank: int) -> None:
    if rank == 0:
        pytest.xfail("not yet")
    if rank == 1:
        time.sleep(LATE)
        raise ValueError("late")


@two
def test_xfail_and_exit_late(rank: int) -> None:
    if rank == 0:
        pytest.xfail("not yet")
    if rank == 1:
        time.sleep(LATE)
        os._exit(3)


@pytest.mark.distcompat(world_size=SIZE or 2, timeout=3)
def test_xfail_and_loop(rank: int) -> None:
    if rank == 0:
        pytest.xfail("not yet")
    while rank == 1:
        pass


@four
def test_xfail_while_a_third_works(rank: int, process_group: Any) -> None:
    """All others wait for both: who left, and who fails before long."""
    if rank == 0:
        pytest.xfail("not yet")
    if rank == LAST:
        time.sleep(3 * LATE)
        raise ValueError("late")
    meet()


@two
def test_xfail_and_wait_for_work(rank: int, process_group: Any) -> None:
    """Wait in a function that this line calls, with no frame of torch in the stack."""
    if rank == 0:
        pytest.xfail("not yet")
    process_group.barrier().wait()


@two
def test_xfail_and_own_store(rank: int, shared_dir: Path) -> None:
    """Whom torch.distributed cannot reach here is none of the ranks."""
    from torch import distributed

    if rank == 0:
        pytest.xfail("not yet")
    if rank == 1:
        await_error(0, shared_dir)
        late = timedelta(seconds=0.1)
        distributed.TCPStore("127.0.0.1", 1, is_master=False, timeout=late)  # type: ignore[attr-defined]


def begin_alone(rank: int) -> Any:
    """On rank 1 begin a collective that nobody joins, since rank 0 xfails; return its work."""
    from torch import distributed, ones

    if rank == 0:
        pytest.xfail("not yet")
    return distributed.all_reduce(ones(2), async_op=True) if rank == 1 else None


@two
def test_xfail_and_wait_for_a_thread(rank: int, process_group: Any) -> None:
    """It waits for nobody in the collective that it has begun."""
    work = begin_alone(rank)
    if rank == 1:
        threading.Event().wait(5 * LATE)
        raise ValueError(f"late, beside {type(work).__name__}")


@two
def test_xfail_and_wait_for_a_lock(rank: int, process_group: Any) -> None:
    """Wait in a call that leaves no frame in the stack; a thread releases it."""
    work = begin_alone(rank)
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()

        def release() -> None:
            time.sleep(5 * LATE)
            lock.release()

        threading.Thread(target=release).start()
        lock.acquire()
        raise ValueError(f"late, beside {type(work).__name__}")


@two
def test_xfail_and_acquire(rank: int, process_group: Any) -> None:
    """Wait in a call that leaves no frame in the stack, and no thread releases it."""
    work = begin_alone(rank)
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=5 * LATE)  # and not wait()
        raise ValueError(f"late, beside {type(work).__name__}")


@two
def test_xfail_and_own_group(rank: int, shared_dir: Path) -> None:
    """It waits in torch, for a store that none of the ranks hosts."""
    from torch import distributed

    if rank == 0:
        pytest.xfail("not yet")
    if rank == 1:
        await_error(0, shared_dir)
        limit, size = timedelta(seconds=3), 2
        distributed.init_process_group("gloo", "tcp://127.0.0.1:1", timeout=limit, rank=1, world_size=size)


@two
def test_xfail_and_skip_late(rank: int) -> None:
    if rank == 0:
        pytest.xfail("not yet")
    time.sleep(LATE)
    pytest.skip("not here")


@two
def test_xfail_on_all(rank: int, process_group: Any) -> None:
    meet()
    pytest.xfail("not yet")


@pytest.fixture
def raises_down() -> Iterator[None]:
    yield
    raise RuntimeError("on the way down")


@two
def test_xfail_and_teardown(raises_down: None, process_group: Any) -> None:
    pytest.xfail("not yet")


@two
def test_all_skip_much_later(rank: int) -> None:
    if rank == 1:
        time.sleep(6)
    pytest.skip("all of us")


test_well_after_all = test_well
