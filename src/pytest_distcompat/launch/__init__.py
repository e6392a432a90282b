"""Launching of ranks: starts them, waits for them, ends them, and reports how they ended.

Knows neither strategies nor checks nor pytest.

``request`` says what ranks do, as plain data. In pytest's process, ``warm`` is the launcher, and
``torchrun`` another one; ``hosting`` watches any foreign command that starts ranks. ``server``,
``agent`` and ``preload`` run in the launcher process and in the fork servers, from which ranks are
forked. ``rank`` is the main function of every rank. ``forensics`` finds out how ranks ended.

Ranks of scripts import from this package too, perhaps in an environment without psutil, so it
imports none of its modules.
"""
