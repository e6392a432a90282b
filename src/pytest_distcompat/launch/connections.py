"""TCP connections of a rank to ranks that do not answer any more.

They are cut, so that the rank waits for those ranks no longer.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from typing import Any

import psutil


def of_store(port: int) -> frozenset[int]:
    """Return the file descriptors of this process's connections to the launch's store.

    The store listens on that port.
    """
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
    this process's own stay, and so do those to the store whose file descriptors are in ``keep``.
    """
    connections = _connections()
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
    """Return the port of an address, a pair of ip and port.

    None of an empty address: the other end is not connected.
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
    from torch import distributed

    with contextlib.suppress(RuntimeError, ValueError):
        if distributed.is_initialized() and distributed.get_backend() == "nccl":
            group = distributed.group.WORLD
            assert group is not None
            group.abort()
