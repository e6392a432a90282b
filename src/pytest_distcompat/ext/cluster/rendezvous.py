"""The rendezvous of a run over several nodes: how the agents of torchrun on all machines meet.

Each *node* (machine) of a run starts its ranks by torchrun's own agent, in its launcher process.
Before that, these agents must meet: they learn how many ranks there are, and where the *store* of
the ranks is, a small key-value server by which ranks find each other (``TCPStore``). torchrun does
that with ``--rdzv-backend c10d``, and so does ``meet`` here. The launcher process of each node
imports it by the name in ``Place.rendezvous``, and calls it for a request over several nodes.

It differs from torchrun in two points. Stores listen on the node's own address only, and nodes have
the numbers that pytest's process gave them, so that rank 0 is always on the first node.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# torch exports TCPStore without saying so.
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from pytest_distcompat import clock
from pytest_distcompat.ext.cluster.place import Place
from pytest_distcompat.launch import loopback
from pytest_distcompat.launch.agent import store_on
from pytest_distcompat.launch.request import Request

#: How often an agent looks whether those of the other nodes have come, in seconds.
MEETING_INTERVAL_S = 0.02


def _brief_delay(seconds: float) -> None:  # noqa: ARG001 - torch passes it by name
    """Wait less than torch does."""
    clock.sleep(MEETING_INTERVAL_S)


class SeveralNodes(DynamicRendezvousHandler):
    """torchrun's c10d rendezvous of the agents of several nodes.

    torch lets the store of the ranks listen on all interfaces; this one listens on the node's own
    address. torch numbers nodes by address and process number; here pytest's process has numbered
    them. These methods, and the names by which torch waits, are private;
    ``tests/launch/test_private_names.py`` fails when they go away.
    """

    #: The port of the ranks' store, once the agents have met.
    port = 0
    #: Which of the nodes this one is, from 0, and how many there are.
    number, nodes = 0, 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents, and note the port of the ranks' store."""
        # torch looks for the other nodes once a second, which is most of a warm run. These names
        # are private: see the class.
        self._state_holder._cache_duration = 0  # type: ignore[attr-defined]  # noqa: SLF001
        module: Any = dynamic_rendezvous
        module._delay = _brief_delay  # noqa: SLF001
        info = super().next_rendezvous()
        assert info.bootstrap_store_info is not None
        self.port = info.bootstrap_store_info.master_port
        return info

    def leave(self, store: Any) -> None:
        """Wait for the other nodes' agents, whose ranks may still use the ``store`` of this one.

        Each agent adds 1 to a counter in the store when its ranks have ended.
        """
        # RuntimeError: the store is gone with the agent that had it, which has left.
        with contextlib.suppress(RuntimeError):
            if self.nodes > 1 and store.add("distcompat/left", 1) < self.nodes:
                clock.wait_until(
                    lambda: store.add("distcompat/left", 0) == self.nodes, math.inf, every=0.01
                )

    def _get_world(self) -> tuple[int, int]:
        """Return the number of this node, from pytest's process, and how many nodes there are."""
        return self.number, super()._get_world()[1]

    # The arguments are those of torch.
    def _create_tcp_store_server(self, master_addr: str, server_port: int) -> Any:  # noqa: ARG002
        """Open the ranks' store on one address only, at a free port."""
        return store_on(loopback.listen(master_addr), master_addr)


def meet(request: Request, listens: Callable[[int], None]) -> SeveralNodes:
    """Return the rendezvous of the request's nodes. Node 0 opens the store on which they meet.

    Args:
        request: What this node runs of the run; its ``place`` has the fields of ``Place``.
        listens: Called with the port of that store, on node 0.
    """
    place = Place(**request.place)
    limit = timedelta(seconds=request.timeout)
    host, port = place.store
    if place.number == 0:
        store = store_on(loopback.listen(host), host)
        listens(store.port)
    else:
        store = TCPStore(host, port, is_master=False, timeout=limit)
    rendezvous = SeveralNodes.from_backend(
        place.run_id,
        store,
        C10dRendezvousBackend(store, place.run_id),
        min_nodes=request.nodes,
        max_nodes=request.nodes,
        local_addr=place.address,
        timeout=RendezvousTimeout(join=limit),
    )
    assert isinstance(rendezvous, SeveralNodes)
    rendezvous.number = place.number
    rendezvous.nodes = request.nodes
    return rendezvous
