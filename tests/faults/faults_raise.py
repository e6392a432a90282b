"""Not collected here: test_raising.py copies it and runs it on real ranks; every test but the first fails by an exception."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import pytest
from tests.faults.faults_group import LAST, LAST_BUT_ONE, four, meet, test_well, two

pytestmark = pytest.mark.usefixtures("process_group")


class Needy(Exception):
    """Its arguments do not fit its constructor: it cannot be made again from them."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"needs {first} and {second}")


class Handful(Exception):
    """Holds what no pickle takes."""

    def __init__(self) -> None:
        super().__init__("hands full")
        self.lock, self.made = threading.Lock(), lambda: None


class Halt(BaseException):
    pass


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def group() -> NoReturn:
    if sys.version_info >= (3, 11):
        raise ExceptionGroup("several", [ValueError("the one"), TypeError("the other")])  # noqa: F821 - as the line above says
    raise ValueError("several")


def chained() -> None:
    try:
        raising(KeyError("deep down"))()
    except KeyError as error:
        raise RuntimeError("on top") from error


def raising(error: BaseException) -> Any:
    def act() -> NoReturn:
        raise error

    return act


ACTS = {
    "needy": raising(Needy(1, 2)),
    "handful": raising(Handful()),
    "halt": raising(Halt("not an Exception")),
    "speechless": raising(Speechless()),
    "group": group,
    "chained": chained,
    "exit 0": lambda: sys.exit(0),
    "exit 3": lambda: sys.exit(3),
    "exit text": lambda: sys.exit("bye"),
    "interrupt": raising(KeyboardInterrupt()),
    "pytest.exit": lambda: pytest.exit("all stop"),
    "surrogate": raising(ValueError("odd \udcff text")),
    "lines": raising(ValueError("first line\nsecond line")),
    "like a lost peer": raising(RuntimeError("Connection closed by peer, says my own code")),
}


@four
def test_before(rank: int) -> None:
    if rank == LAST_BUT_ONE:
        raise ValueError("before the collective")
    meet()


@two
def test_inside(rank: int) -> None:
    import torch
    from torch import distributed

    distributed.all_reduce("no tensor" if rank == 1 else torch.ones(2))


@two
def test_while_one_is_under_way(rank: int) -> None:
    import torch
    from torch import distributed

    if rank == 1:
        # The others are not there yet.
        work = distributed.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        assert not work.is_completed()
        raise ArithmeticError("while it is under way")
    time.sleep(0.2)
    meet()


@two
def test_in_a_collective_that_a_peer_abandoned(rank: int) -> None:
    from torch import distributed

    group = distributed.new_group([0, 1])
    if rank == 0:
        distributed.monitored_barrier(group, timeout=timedelta(seconds=0.5))
    if rank == 1:
        time.sleep(60)
    meet()


@two
def test_in_a_hook_of_the_reducer(rank: int) -> None:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    def hook(state: None, bucket: Any) -> Any:
        if rank != 1:
            time.sleep(0.2)
        work = distributed.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        if rank == 1:
            raise ArithmeticError("in a hook of the reducer")
        return work.get_future().then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # torch compares them with types, and here they are strings
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    model(torch.ones(1, 4)).sum().backward()
    meet()


@four
def test_inside_of_backward(rank: int) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise ArithmeticError("in the backward pass")
        return gradient

    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    model.module[0].weight.register_hook(hook)
    model(torch.ones(1, 4)).sum().backward()


@two
def test_after(rank: int) -> None:
    meet()
    if rank == 1:
        raise ValueError("after the collective")


@four
def test_after_while_the_others_meet_again(rank: int) -> None:
    meet()
    if rank == LAST:
        raise ValueError("between two collectives")
    meet()


@four
def test_different(rank: int) -> None:
    if rank == LAST_BUT_ONE:
        raise ValueError("the first")
    if rank == (LAST_BUT_ONE or 2) - 1:
        time.sleep(0.1)
        raise TypeError("the second")
    meet()


@two
def test_on_all(rank: int) -> None:
    raise ValueError(f"on rank {rank}")


@two
@pytest.mark.parametrize("act", ACTS)
def test_one(act: str, rank: int) -> None:
    if rank == 1:
        ACTS[act]()
    meet()


@two
def test_in_a_thread_that_is_waited_for(rank: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    if rank == 1:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(raising(ValueError("in a thread"))).result()
    meet()


@two
def test_in_a_forked_child(rank: int) -> None:
    if rank == 1:
        child = os.fork()
        if not child:
            raise ValueError("in a forked child")
        os.waitpid(child, 0)


@two
def test_dataloader_worker_raises(rank: int) -> None:
    from torch.utils.data import DataLoader

    if rank == 1:
        list(
            DataLoader(
                [1, 2],  # type: ignore[arg-type]
                num_workers=1,
                collate_fn=raising_in_a_worker,
            )
        )
    meet()


def raising_in_a_worker(batch: Any) -> NoReturn:
    raise LookupError(f"in worker process {os.getpid()}")


test_well_after_all = test_well
