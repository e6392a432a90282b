"""Launching of ranks: starts them, waits for them, ends them, and reports how they ended.

Knows neither strategies nor checks nor pytest.

``request`` is plain data. ``warm`` is the launcher of the parent, and ``hosting`` watches any
foreign launcher, torchrun's command among them. ``server``, ``agent`` and ``preload`` run in the
launcher process and in the fork servers. ``rank`` is the main of every rank. ``forensics`` finds
out how ranks ended.

Ranks of scripts import from this package too, perhaps in an environment without psutil, so it
imports none of its modules.
"""
