"""The ranks' end of ranks that live on: request after request, each as in a process of its own as far as that can be had."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pytest_distcompat.launch import randomness, rank
from pytest_distcompat.launch.request import RankLog, Request
from pytest_distcompat.launch.surroundings import Sizes, Surroundings

#: How long a process group may take to prove that it is as sound as before, in seconds.
HEALTHY = 5.0

_CLEARED = "distcompat/cleared/"


class Store:
    """The agent's store, over which process groups meet. torch expects a new one for each life of a rank's process."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

        self._rank = int(os.environ["RANK"])
        self._store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._listed = hasattr(self._store, "list_keys")
        self._agents = set(self._store.list_keys()) if self._listed else set()
        self._keys = self._store.num_keys()
        self._times = 0

    def clear(self) -> None:
        """Remove what process groups left there: another one would take it for its own. Called by all ranks together.

        In a torch without ``list_keys`` nothing can be removed; ``used`` tells then.
        """
        self._times += 1
        done = f"{_CLEARED}{self._times}"
        if self._rank == 0:
            for key in set(self._store.list_keys()) - self._agents if self._listed else ():
                # A slower rank still waits for one of these.
                if not key.startswith(_CLEARED):
                    self._store.delete_key(key)
            self._store.set(done, "")
        self._store.wait([done])

    def used(self) -> bool:
        """Whether there are keys that ``clear`` cannot remove."""
        return not self._listed and self._store.num_keys() > self._keys + self._times


class Kept:
    """What of this process outlives a request; ``directory`` is that of its life."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = Store()
        self.group: Any = None
        self._counted = 0
        self.at_end: list[Callable[[], None]] = []

    def process_group(self, backend: str) -> Any:
        """The default process group, made by the first request that asks for it."""
        from torch import distributed

        if self.group is None:
            distributed.init_process_group(backend)
            self.group = distributed.group.WORLD
        return self.group

    def without_group(self) -> None:
        """Leave no process group to a request that may make its own. Called by all ranks together."""
        from torch import distributed

        if self.group is not None:
            self.group = None
            distributed.destroy_process_group()
            self.store.clear()

    def begin_proof(self) -> Callable[[], bool]:
        """Have the process group do something; what it gives waits for that, and says whether it was done rightly.

        The group must be ours, and still do what it should: a collective left half done would show. To wait for the
        other ranks takes as long as all the rest of looking at what a request left, which can be done meanwhile.
        """
        import torch
        from torch import distributed

        if self.group is None or not distributed.is_initialized():
            there = self.group is not None or distributed.is_initialized()
            return lambda: not there
        if distributed.group.WORLD is not self.group:
            return lambda: False
        self._counted += 1
        expected = float(self._counted * distributed.get_world_size())
        device = "cpu" if distributed.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
        count = torch.full((), float(self._counted), device=device)
        try:
            work = distributed.all_reduce(count, async_op=True)
        except RuntimeError:
            return lambda: False

        def sound() -> bool:
            try:
                work.wait(timedelta(seconds=HEALTHY))
            except RuntimeError:
                return False
            return bool(count.item() == expected)

        return sound


#: Set in ranks that live on.
kept: Kept | None = None


def serve(payload: Mapping[str, Any], log: RankLog) -> None:
    """Do the requests that come over the socket ``payload["socket"]``, a line each, until it is closed.

    A request that fails ends this process, as it ends any rank. After any other, tell what it left changed.
    """
    global kept  # noqa: PLW0603 - whoever runs in this process asks for it
    kept = Kept(log.path.parent)
    looks = Looks()
    request: Request | None = None
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(payload["socket"])
        for line in channel.makefile("r", encoding="utf-8"):
            request = Request.from_line(line)
            changed = _one(kept, request, looks)
            channel.sendall(f"{json.dumps({'rank': log.rank, 'changed': changed})}\n".encode())
            # For the next one; now, for nobody waits for it.
            randomness.renew()
    for call in reversed(kept.at_end):
        try:
            call()
        except BaseException as error:  # a fixture's teardown may raise anything
            assert request is not None
            rank.fail(request, RankLog(request.directory, log.rank), error)
    if kept.group is not None:
        kept.without_group()


class Looks:
    """What is looked at to find what a request left: how this process was before it, and what may not grow too much."""

    def __init__(self) -> None:
        self._sizes = Sizes()
        self._wanted: tuple[object, ...] = ()
        self._before = Surroundings.now()

    def begin(self, request: Request) -> None:
        """Look at how this process is, which ``rank.prepare`` has brought to where the request wants it.

        The last request left it as it found it, or there would be no other: nothing to see, unless this one wants it elsewhere.
        """
        wanted = (request.set, request.unset, request.cwd, request.import_path)
        if wanted != self._wanted:
            self._wanted, self._before = wanted, Surroundings.now()

    def changes(self) -> list[str]:
        """The names of what is not as it was, and of what has grown too much."""
        return Surroundings.now().changes(self._before) + self._sizes.grown()


def _one(kept: Kept, request: Request, looks: Looks) -> list[str]:
    """Do one request; what it left changed."""
    if kept.group is None:
        kept.store.clear()
    with _back_afterwards(request):
        rank.prepare(request)
        looks.begin(request)
        rank.perform(request)
        # What comes next in this life's logs is the next request's.
        rank.flush()
        sound = kept.begin_proof()
        changed = looks.changes()
    if not sound():
        changed.append("the process group")
    if kept.store.used():
        changed.append("the store of process groups")
    return changed


@contextlib.contextmanager
def _back_afterwards(request: Request) -> Iterator[None]:
    """What ``prepare`` changes is as it was, for the next request, which says what it wants beside that."""
    touched = {name: os.environ.get(name) for name in (*request.set, *request.unset)}
    path = list(sys.path)
    yield
    for name, value in touched.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = path
