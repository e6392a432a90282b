"""Forensics of a run: which rank failed first, and why.

A run is one process group from start to end. ``watchdog`` ends its ranks at the time limit, or
when they wait for one that is gone. ``stacks``, ``flight_recorder`` and ``collectives`` say where
each rank was, ``stalled_ranks`` whether it waits for another, ``deaths`` why a signal came.
``conclude`` puts all that together, ``root_cause`` picks the rank that failed first, and ``ending``
is the result, which launchers return.

Ranks of scripts import from this package too, perhaps in an environment without psutil, so it
imports none of its modules.
"""
