"""Functions that shared ranks run, one request after the other. Only ranks import them, as ``reused_bodies``."""

from __future__ import annotations

import importlib
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pytest_distcompat.events import Note
from pytest_distcompat.ext.reuse import request_loop
from pytest_distcompat.launch import randomness
from pytest_distcompat.launch.rank_log import RankLog


def note(log: RankLog, event: str, **data: Any) -> None:
    """Log an event of the test's own."""
    log.write(Note(event, data))


def report_process(payload: Mapping[str, Any], log: RankLog) -> None:
    """Who and where this is."""
    import torch

    note(
        log,
        "seen",
        pid=os.getpid(),
        environ=dict(os.environ),
        cwd=os.getcwd(),  # noqa: PTH109 - as the system says it
        numbers=[random.random(), float(torch.rand(()))],
    )
    if "seed" in payload:
        random.seed(payload["seed"])
        torch.manual_seed(payload["seed"])


def print_words(payload: Mapping[str, Any], log: RankLog) -> None:
    """Past all of Python."""
    os.write(1, payload["words"].encode())
    if payload.get("fail"):
        raise ValueError(payload["words"])


def own_group(payload: Mapping[str, Any], log: RankLog) -> None:
    """A process group from the environment, properly ended."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    total = torch.ones(())
    distributed.all_reduce(total)
    note(log, "sum", value=float(total))
    distributed.destroy_process_group()


def shared_group(payload: Mapping[str, Any], log: RankLog) -> None:
    """The group that outlives requests; ``payload["half"]``: a rank does one collective more than the others."""
    import torch
    from torch import distributed

    assert request_loop.reused is not None
    group = request_loop.reused.process_group("gloo")
    # Two requests without a group would have the same id, that of None.
    assert group is not None
    total = torch.ones(())
    distributed.all_reduce(total)
    note(log, "sum", value=float(total), group=id(group))
    if payload.get("half") and distributed.get_rank() == 0:
        distributed.all_reduce(torch.full((), 7.0), async_op=True)


def corrupt(payload: Mapping[str, Any], log: RankLog) -> None:
    """Use the group that outlives requests, then do to it what ``payload["what"]`` says."""
    import torch
    from torch import distributed

    assert request_loop.reused is not None
    request_loop.reused.process_group("gloo")
    distributed.all_reduce(torch.ones(()))
    _SPOILED[payload["what"]](log.rank)


def _unfinished(rank: int, group: Any = None) -> None:
    import torch
    from torch import distributed

    # Each rank waits for the other's second part, or for one that is longer.
    for tensor in (torch.ones(2), torch.ones(())) if rank == 0 else (torch.ones(()),):
        distributed.all_reduce(tensor, group=group, async_op=True)


def _alone(rank: int) -> None:
    import torch
    from torch import distributed

    if rank == 0:
        distributed.all_reduce(torch.ones(2), async_op=True)


def _destroyed(rank: int) -> None:
    from torch import distributed

    distributed.destroy_process_group()


def _hidden(rank: int) -> None:
    # As tests hide a package.
    sys.modules["torch"] = None  # type: ignore[assignment]


def _below(rank: int) -> None:
    from torch import distributed

    # Its own: that of all ranks stays sound.
    _unfinished(rank, distributed.new_group([0, 1]))


_SPOILED: Mapping[str, Callable[[int], object]] = {
    "a collective of one rank that nobody waits for": _alone,
    "collectives that do not fit": _unfinished,
    "destroyed": _destroyed,
    "destroyed on one rank": lambda rank: _destroyed(rank) if rank == 1 else None,
    "no torch": _hidden,
    "no torch on one rank": lambda rank: _hidden(rank) if rank == 1 else None,
    "a group below it": _below,
}


def no_group(payload: Mapping[str, Any], log: RankLog) -> None:
    """As before a test that may make its own."""
    assert request_loop.reused is not None
    request_loop.reused.without_group()


def at_end(payload: Mapping[str, Any], log: RankLog) -> None:
    """Leave something that goes wrong when the ranks leave."""
    assert request_loop.reused is not None
    request_loop.reused.at_end.append(lambda: globals().pop("no such fixture"))


def sleep_at_end(payload: Mapping[str, Any], log: RankLog) -> None:
    """Leave something that takes too long when the ranks leave."""
    assert request_loop.reused is not None
    request_loop.reused.at_end.append(lambda: time.sleep(60))


def break_randomness(payload: Mapping[str, Any], log: RankLog) -> None:
    """Leave what nobody compares, and what fails after the request."""

    def renew() -> None:
        raise ZeroDivisionError

    if log.rank == 0:
        randomness.renew = renew


def imports(payload: Mapping[str, Any], log: RankLog) -> None:
    """Import accelerate, which nobody did before, and set the level of its logger as ``payload["level"]`` says."""
    # As around every test of pytest: what is imported adds filters.
    with warnings.catch_warnings():
        importlib.import_module("accelerate")
    logging.getLogger("accelerate").setLevel(payload["level"])
    note(log, "seen", pid=os.getpid())
