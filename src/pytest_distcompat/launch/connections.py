"""Cut the TCP connections of a rank to ranks that do not answer any more.

The rank may wait for them in a collective, in C++, where no signal and no exception reaches it.
Once its connections are cut, the collective raises. ``ext/inside/lockstep`` does so on ranks that
run pytest under torchrun, when another rank has left the test: ``of_store`` before the first test,
``cut`` when it is needed.

The *store* is torchrun's TCP server on ``MASTER_PORT``, by which the ranks of a group find each
other.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from typing import Any

import psutil


def of_store(port: int) -> frozenset[int]:
    """Return the file descriptors of this process's connections to the store on that port."""
    descriptors = set()
    for connection in _connections():
        if connection.pid == os.getpid() and _port(connection.raddr) == port:
            descriptors.add(connection.fd)
    return frozenset(descriptors)


def cut(peers: Collection[int], port: int, keep: Collection[int]) -> None:
    """Shut this process's connections to its peers and to the store.

    A thread that waits for a peer in gloo, or for a peer's address in the store, then gets
    "Connection closed by peer" or the like. gloo's own ``ProcessGroup.abort`` leaves it waiting
    (torch 2.13). NCCL, which need not use TCP, has its communicator aborted. Nothing is cut where
    the system does not list connections (psutil.AccessDenied). Connections that come to a store of
    this process's own stay.

    Args:
        peers: The process numbers of the other ranks on this machine.
        port: The port of the store.
        keep: File descriptors of connections to the store that stay.
    """
    connections = _connections()
    # A connection has two ends, each listed with its process: the local address of a peer's end is
    # the remote address of this process's end.
    peers_addresses = {
        tuple(connection.laddr) for connection in connections if connection.pid in peers
    }
    for connection in connections:
        if connection.pid != os.getpid() or _port(connection.laddr) == port:
            # Another process's, or one that came to a store of this process's own.
            continue
        to_store = _port(connection.raddr) == port and connection.fd not in keep
        if to_store or tuple(connection.raddr) in peers_addresses:
            _shut(connection.fd)
    _abort_nccl()


def _port(address: Any) -> int | None:
    """Return the port of an address such as ``("127.0.0.1", 29500)``; None of an empty one.

    The remote address of a socket that is not connected is empty.
    """
    return address[1] if address else None


def _shut(descriptor: int) -> None:
    """Shut a connection of this process; it may have been closed in the meantime."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _connections() -> list[Any]:
    """Return all TCP connections that the system lists, each end with its process."""
    try:
        return psutil.net_connections(kind="tcp")
    except psutil.Error:
        return []


def _abort_nccl() -> None:
    """Abort the communicator of the default process group if it is one of NCCL."""
    from torch import distributed

    with contextlib.suppress(RuntimeError, ValueError):
        if distributed.is_initialized() and distributed.get_backend() == "nccl":
            group = distributed.group.WORLD
            assert group is not None
            group.abort()
