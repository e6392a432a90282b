"""Common end of all ranks of a script after a checkpoint, as if they had been preempted.

``resume_roundtrip`` needs a run that ends right after the checkpoint of step 3, say. The script
knows nothing of that, so the *probe*, the code that records the script from inside each rank
(process that trains), ends the process. The ``Recorder`` calls these functions when the script goes
on after that step: first ``anyone_wrote``, unless all ranks have written a checkpoint together;
then ``exit_together``, if there is a checkpoint.

Ranks agree through their log files (``rank-0.jsonl``, one event a line), which all of them can
read. A collective, such as ``torch.distributed.barrier``, could meet one of the script's own.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

from pytest_distcompat import clock
from pytest_distcompat.ext.scripts.hosted_rank import HostedRank

if TYPE_CHECKING:
    from pytest_distcompat.events import Event

_E = TypeVar("_E", bound="Event")

#: How many seconds a rank waits for the others to write their parts of a checkpoint.
CHECKPOINT_TIMEOUT_S = 60.0


def anyone_wrote(hosted_rank: HostedRank, wrote: bool) -> bool:
    """Wait until all ranks call this, and tell whether any of them wrote a file after the step.

    A file by ``torch.save`` is mostly written by rank 0 alone. Here the others learn of it, by the
    event ``TrainsOn``: a rank logs it as it goes on after the step, with whether it has saved.

    Args:
        hosted_rank: This rank.
        wrote: Whether this rank wrote a file.
    """
    from pytest_distcompat.ext.scripts.events import TrainsOn

    events = _from_all_ranks(hosted_rank, TrainsOn(wrote))
    return any(event.saved for event in events)


def exit_together(hosted_rank: HostedRank) -> None:
    """Wait until all ranks call this, and end this process by ``os._exit(0)``.

    A rank that ended earlier would break off the others while they still write their parts of the
    checkpoint.
    """
    from pytest_distcompat.ext.scripts.events import Stopped

    _from_all_ranks(hosted_rank, Stopped())
    hosted_rank.exit_like_preempted()


def _from_all_ranks(hosted_rank: HostedRank, event: _E) -> list[_E]:
    """Log the event, wait until all ranks have logged one of its class, and return these.

    If some rank does not in time, return those that are there: it may have ended or hang, which
    the parent process finds out.
    """
    from torch import distributed

    from pytest_distcompat.events import of_kind
    from pytest_distcompat.launch.rank_log import LogReader

    hosted_rank.log.write(event)
    world_size = 1
    if distributed.is_initialized():
        world_size = distributed.get_world_size()
    logs = LogReader(hosted_rank.directory, range(world_size))
    logged: list[_E] = []

    def all_logged() -> bool:
        of_each_rank = []
        for events in logs.read().values():
            of_each_rank.append(of_kind(type(event), events))
        # In place, because the outer function returns this list.
        logged[:] = itertools.chain.from_iterable(of_each_rank)
        # The list of a rank that has not logged one yet is empty.
        return all(of_each_rank)

    clock.wait_until(all_logged, CHECKPOINT_TIMEOUT_S, every=0.05)
    return logged
