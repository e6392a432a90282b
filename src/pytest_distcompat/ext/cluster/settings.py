"""``Settings``: the nodes (machines) of a session, as its options describe them.

``session_nodes`` makes them from the options; ``launcher``, ``membership``, ``run`` and ``alike``
read them. *Ranks* are the processes of a run; a *lease* gives a run devices for a while.

There are two ways to use nodes. Either a run may span several of them: then ``nodes`` is how many,
and ``node`` is empty. Or the workers of pytest-xdist are dealt out over the nodes: then all runs of
one worker, which is a pytest process with ``Settings`` of its own, are on its ``node``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The nodes of a session, and how runs may use their devices.

    Attributes:
        nodes: The most nodes that a run spans; 1 where ``node`` has all runs of this process.
        root: pytest's root directory (``rootdir``).
        device: ``cpu`` or ``cuda``.
        listen: Where node agents join: host and port, 0 for a free one. An agent is the process
            that starts ranks on its node.
        token: The secret that they must know; empty for a random one.
        wait: How long they may take to join, in seconds.
        shared: A directory that all nodes must share; empty if they need none.
        node: The name of the node that has all runs of this process, and leases its devices itself;
            empty where runs span nodes.
        spare: The names of the nodes that take over all runs, one after another, where ``node`` is
            lost. The last one is ``node`` itself, because only its agent may be gone.
        timeline: The directory where leases are recorded: which run had which devices, and when.
        worker: The xdist worker whose leases they are, such as ``gw0``; empty without xdist.
        gpus: How many GPUs of each node runs may have; 0 if they run on the CPU.
        ranks_each: How many ranks can share a GPU.
        runs_share: Whether runs can share a GPU.
        say: Shows the user what a run waits for.
    """

    nodes: int
    root: str
    device: str
    listen: tuple[str, int]
    token: str
    wait: float
    shared: str = ""
    node: str = ""
    spare: tuple[str, ...] = ()
    timeline: str = ""
    worker: str = ""
    gpus: int = 0
    ranks_each: int = 1
    runs_share: bool = False
    say: Callable[[str], None] = print
