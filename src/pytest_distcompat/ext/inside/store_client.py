"""Client of torchrun's TCPStore, through which the ranks exchange texts; it never waits in C.

The store is a TCP server with values by key, on ``MASTER_PORT``. Process groups of torch use it
too. Under ``torchrun -m pytest`` each rank has a ``StoreClient`` (``lockstep``): after
``put("17/1", "...")`` on rank 1, ``get("17/1")`` returns the text on rank 0. ``get`` returns at
once, since a thread that waits in torch's C++ code could not be ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

#: Separates these keys from those of process groups.
PREFIX = "distcompat/"


class StoreClient:
    """Texts by key, for all threads of this rank.

    Args:
        rank: This rank.
        size: The number of ranks.

    Attributes:
        lost: Whether the store is gone, with the process that served it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._store = _store(rank, size)
        #: The keys that were there before the first process group. None in an older torch, which
        #: cannot list keys: then none are cleared.
        self._initial_keys = (
            set(self._store.list_keys()) if hasattr(self._store, "list_keys") else None
        )
        # The main thread and the watcher's use the store.
        self._lock = threading.RLock()
        self.lost = False

    def put(self, key: str, text: str) -> None:
        """Set a key, for all ranks."""
        with self._noting_loss():
            self._store.set(PREFIX + key, text)

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is not set."""
        value: bytes | None = None
        with self._noting_loss():
            if self._store.check([PREFIX + key]):
                value = self._store.get(PREFIX + key)
        return None if value is None else value.decode()

    def forget(self, keys: Iterable[str]) -> None:
        """Delete keys that all ranks have read."""
        with self._noting_loss():
            for key in keys:
                self._store.delete_key(PREFIX + key)

    def clear(self) -> None:
        """Delete the keys of earlier process groups, which the next one would take for its own."""
        if self._initial_keys is not None:
            with self._noting_loss():
                for key in set(self._store.list_keys()) - self._initial_keys:
                    if not key.startswith(PREFIX):
                        self._store.delete_key(key)

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Use the store in the block, alone among threads; note that it is gone if it raises."""
        with self._lock:
            try:
                yield
            except RuntimeError:
                self.lost = True


def _store(rank: int, size: int) -> Any:
    """Return a new connection to the launch's store.

    If the launcher has no store, rank 0 opens it, for groups too.
    """
    # torch exports it without saying so.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(address, port, is_master=False)
    # As torchrun sets it: init_process_group then connects to this store instead of opening its
    # own.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    return TCPStore(address, port, size, is_master=rank == 0, wait_for_workers=False)
