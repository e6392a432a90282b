"""Where the ranks of somebody's launch leave word for one another: the store of the launch, never waited for in C."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pytest_distcompat import clock

#: Apart from the keys of process groups.
PREFIX = "distcompat/"
#: Seconds between two looks.
POLL = 0.01


class StoreClient:
    """Texts by key, for all threads of this rank. ``lost``: the store is gone with the process that had it."""

    def __init__(self, rank: int, size: int) -> None:
        self._store = _store(rank, size)
        # An older torch cannot list them; then nothing is cleared.
        self._before = set(self._store.list_keys()) if hasattr(self._store, "list_keys") else None
        self._lock = threading.RLock()
        self.lost = False

    def put(self, key: str, text: str) -> None:
        """For all ranks."""
        with self._reached():
            self._store.set(PREFIX + key, text)

    def get(self, key: str) -> str | None:
        """None if nobody has put it there."""
        found: bytes | None = None
        with self._reached():
            found = self._store.get(PREFIX + key) if self._store.check([PREFIX + key]) else None
        return None if found is None else found.decode()

    def wait(self, key: str, deadline: float, hopeless: Callable[[], bool]) -> str | None:
        """Look for it until then (monotonic), or until it is hopeless."""
        while (text := self.get(key)) is None and clock.now() < deadline and not self.lost:
            if hopeless():
                return self.get(key)
            clock.sleep(POLL)
        return text

    def forget(self, keys: Iterable[str]) -> None:
        """Remove what all ranks have read."""
        with self._reached():
            for key in keys:
                self._store.delete_key(PREFIX + key)

    def clear(self) -> None:
        """Remove what process groups left there: the next one would take it for its own."""
        if self._before is not None:
            with self._reached():
                for key in set(self._store.list_keys()) - self._before:
                    if not key.startswith(PREFIX):
                        self._store.delete_key(key)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except RuntimeError:
                self.lost = True


def _store(rank: int, size: int) -> Any:
    """A connection of our own to the store of the launch. Where the launcher has none rank 0 opens it, for groups too."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(address, port, is_master=False)
    # What torchrun's ranks have: init_process_group then connects, and opens nothing itself.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    return TCPStore(address, port, size, is_master=rank == 0, wait_for_workers=False)
