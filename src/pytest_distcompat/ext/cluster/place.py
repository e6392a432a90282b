"""``Place``: which of a run's nodes a machine is, and where it meets the others.

pytest's process (``run``) sends one to each node of a run over several machines. Each node starts
some of the run's *ranks* (processes). They find each other by a *store*, a small key-value server
on the first node. The node's ``agent`` puts its fields into the request, and ``rendezvous`` reads
them in the launcher process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The part of a run of several nodes that one node runs; ``Request.place`` has its fields.

    Attributes:
        number: Which of the run's nodes it is, from 0: torchrun's group rank.
        address: The node's own address, by which the ranks of other nodes reach it.
        store: Address and port of the store on which the nodes meet; the port is 0 for node 0,
            which opens the store.
        run_id: The run's id, which all nodes have from pytest's process.
        rendezvous: The function by which the node's agent meets the others. The launcher process
            imports it, as it needs torch.
    """

    number: int
    address: str
    store: tuple[str, int]
    run_id: str
    rendezvous: str = "pytest_distcompat.ext.cluster.rendezvous:meet"
