"""End of all ranks after a checkpoint, as if they had been preempted, when every rank has written its part."""

from __future__ import annotations

from pytest_distcompat import clock
from pytest_distcompat.scripts.hosted_rank import HostedRank

#: How many seconds a rank waits for the others to write their parts of a checkpoint.
CHECKPOINT_TIMEOUT_S = 60.0


def exit_together(hosted_rank: HostedRank) -> None:
    """End this process when every rank has called this.

    Ranks wait for each other by their log files, because the probe takes part in no collective.
    """
    from torch import distributed

    from pytest_distcompat.events import of_kind
    from pytest_distcompat.launch.rank_log import LogReader
    from pytest_distcompat.scripts.events import Stopped

    hosted_rank.log.write(Stopped())
    logs = LogReader(hosted_rank.directory, range(distributed.get_world_size() if distributed.is_initialized() else 1))
    deadline = clock.now() + CHECKPOINT_TIMEOUT_S
    while not all(of_kind(Stopped, events) for events in logs.read().values()) and clock.now() < deadline:
        clock.sleep(0.05)
    hosted_rank.exit_like_preempted()
