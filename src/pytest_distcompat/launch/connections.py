"""TCP connections of a rank to ranks that do not answer any more: cut, so that it waits for them no longer."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from typing import Any

import psutil


def of_store(port: int) -> frozenset[int]:
    """Return the file descriptors of this process's connections to the launch's store, which listens on that port."""
    me = os.getpid()
    found = _connections()
    return frozenset(one.fd for one in found if one.pid == me and tuple(one.raddr)[1:] == (port,))


def cut(peers: Collection[int], port: int, keep: Collection[int]) -> None:
    """Shut this process's connections to its peers and to the store.

    A thread that waits for a peer in gloo, or for a peer's address in the store, then gets "Connection closed by peer" or the
    like. gloo's own ``ProcessGroup.abort`` leaves it waiting (torch 2.13). NCCL, which need not use TCP, has its communicator
    aborted. Nothing is cut where the system does not list connections (psutil.AccessDenied). Connections that come to a store
    of this process's own stay, and so do those to the store whose file descriptors are in ``keep``.
    """
    me = os.getpid()
    # Addresses are pairs of ip and port; empty where the other end is not connected.
    found = _connections()
    theirs = {tuple(one.laddr) for one in found if one.pid in peers}
    for one in found:
        of_store = tuple(one.laddr)[1:] == (port,)
        to_store = tuple(one.raddr)[1:] == (port,) and one.fd not in keep
        if one.pid == me and not of_store and (to_store or tuple(one.raddr) in theirs):
            # It may have been closed in the meantime.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    _abort_nccl()


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
