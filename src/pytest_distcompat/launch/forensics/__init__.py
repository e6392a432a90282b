"""Forensics of a run: which rank failed first, and why.

It notices ranks that hang or died, and reads what they left. ``watchdog`` ends ranks at the time
limit, or when they wait for one that is gone; ``stacks``, ``flight_recorder`` and ``collectives``
say where each rank was, ``stalled_ranks`` whether it waits for another, ``deaths`` why a signal
came; ``ending`` puts all that together.

Ranks of scripts import from this package too, perhaps in an environment without psutil, so it
imports none of its modules.
"""
