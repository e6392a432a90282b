"""A debugger in one rank of a run at the user's terminal: it stops where the rank failed, while the other ranks wait."""

from __future__ import annotations

import math

from pytest_distcompat import clock
from pytest_distcompat.events import has_ended
from pytest_distcompat.launch import pristine_builtins
from pytest_distcompat.launch.rank_log import LogReader, RankLog

#: The option of ``python -m pytest_distcompat.launch.rank`` with the rank to debug.
OPTION = "--pdb"


def stop(log: RankLog, error: BaseException) -> None:
    """Start the debugger at an error of the rank to debug; on another rank wait until that one has ended.

    A failed rank that ended at once would take the rank to debug with it. Does nothing in a run without a rank to debug.
    """
    if log.debugged is None:
        return
    began = clock.now()
    if log.rank == log.debugged:
        import pdb  # noqa: T100 - the user asked for it

        message = pristine_builtins.format_exception_only(error)[-1].strip()
        print(f"\nrank {log.rank}: {message}")  # noqa: T201 - the user looks at the terminal
        pdb.post_mortem(error.__traceback__)
        return
    debugged = LogReader(log.path.parent, [log.debugged])
    # The log of an earlier run may still be there.
    clock.wait_until(
        lambda: any(has_ended(event for event in events if event.time > began) for events in debugged.read().values()),
        math.inf,
        every=0.1,
    )
