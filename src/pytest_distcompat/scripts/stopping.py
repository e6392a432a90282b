"""Ranks that leave after a checkpoint, as if they had been preempted: not before every one of them has written its part."""

from __future__ import annotations

from pytest_distcompat import clock
from pytest_distcompat.scripts.hosted_rank import HostedRank

#: Seconds that a rank waits for the others to be done with a checkpoint.
STOP_TIME = 60.0


def leave_together(hosted_rank: HostedRank) -> None:
    """End this process once every rank has come here: files tell, for a collective would be one too many."""
    from torch import distributed

    hosted_rank.log.write("stopped")
    ranks = range(distributed.get_world_size() if distributed.is_initialized() else 1)
    deadline = clock.now() + STOP_TIME
    while not all(hosted_rank.heard("stopped", rank) for rank in ranks) and clock.now() < deadline:
        clock.sleep(0.05)
    hosted_rank.leave()
