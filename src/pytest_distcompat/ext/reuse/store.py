"""Client of torchrun's store on a reused rank, which clears the store between two tests.

The store is a TCP server with values by key, by which the ranks of a process group find each other.
A reused rank, a process that runs one test after the other, has one ``Store`` (``request_loop``).
It calls ``clear`` before a test, so that the test can make a process group, and ``announce_done``
after it, to wait for the other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

#: How the keys in the store begin by which ranks tell each other that the store is cleared, and
#: that they are done with a request.
_CLEARED = "distcompat/cleared/"
_DONE = "distcompat/done/"


class Store:
    """A client of the store, which clears it between two requests.

    Process groups leave keys in the store, such as the ranks' addresses. torch expects a new store
    for each process group: the next one would take these keys for its own.
    """

    def __init__(self) -> None:
        # torch exports it without saying so.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # A request may change the environment.
        self._rank = int(os.environ["RANK"])
        self._ranks = int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        self._store = TCPStore(address, port, is_master=False)
        #: Whether this release of torch can list the keys.
        self._can_list = hasattr(self._store, "list_keys")
        #: The keys of torchrun's agent, which stay.
        self._agent_keys = set(self._store.list_keys()) if self._can_list else set()
        #: How many keys there were at first.
        self._initial_keys = self._store.num_keys()
        #: How often ``clear`` was called, and how many requests this rank has finished.
        self._clears = 0
        self._requests = 0

    def announce_done(self) -> Callable[[], None]:
        """Announce that this rank has finished the request.

        All ranks add to one count. The rank that makes it complete sets a key, for which the others
        wait.

        Returns:
            A function that waits until all ranks have finished it.
        """
        self._requests += 1
        count = f"{_DONE}count"
        all_done = f"{_DONE}{self._requests}"
        # The count goes on from request to request, so it is complete at this product.
        if self._store.add(count, 1) == self._requests * self._ranks:
            self._store.set(all_done, "")
            return lambda: None
        # Practically no limit: pytest's process enforces the request's own, and kills this rank.
        return lambda: self._store.wait([all_done], timedelta(days=1))

    def clear(self) -> None:
        """Remove the keys that process groups left, which a new group would take for its own.

        All ranks call it together. In a torch without ``list_keys`` nothing can be removed;
        ``has_leftover_keys`` is true then.
        """
        self._clears += 1
        done = f"{_CLEARED}{self._clears}"
        if self._rank == 0:
            keys = self._store.list_keys() if self._can_list else []
            leftover = set(keys) - self._agent_keys
            for key in leftover:
                # A slower rank may still wait for one of these.
                if not key.startswith((_CLEARED, _DONE)):
                    self._store.delete_key(key)
            self._store.set(done, "")
        self._store.wait([done])

    def has_leftover_keys(self) -> bool:
        """Tell whether there are keys that ``clear`` could not remove, in an older torch."""
        if self._can_list:
            return False
        # Keys of this class: one for each call of ``clear``, one for each request, and the count of
        # ranks that are done.
        own_keys = self._clears + self._requests + 1
        return bool(self._store.num_keys() > self._initial_keys + own_keys)
