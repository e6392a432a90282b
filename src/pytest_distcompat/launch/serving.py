"""The ranks' end of ranks that live on: request after request, each as in a process of its own as far as that can be had."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pytest_distcompat.launch import pristine_builtins, randomness, rank
from pytest_distcompat.launch.process_state import ProcessState, Sizes
from pytest_distcompat.launch.request import RankLog, Request

#: How long a process group may take to prove that it is as sound as before, in seconds, and which part of its request's
#: time limit at most: it must not look as if the request hung.
HEALTHY, HEALTHY_PART = 5.0, 0.25
#: How long its destruction may take, which waits for collectives that nobody ever joins; and how long at the end of the
#: process, which ends it too.
DESTROYED, DESTROYED_AT_END = 5.0, 1.0

_CLEARED = "distcompat/cleared/"
_DONE = "distcompat/done/"


class Store:
    """The agent's store, over which process groups meet. torch expects a new one for each run of a rank's process."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

        # A request may change the environment.
        self._rank, self._ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._listed = hasattr(self._store, "list_keys")
        self._agents = set(self._store.list_keys()) if self._listed else set()
        self._keys = self._store.num_keys()
        self._times = 0
        self._requests = 0

    def told_done(self) -> Callable[[], None]:
        """Tell the other ranks that this one has done its request; what it gives waits until all of them have."""
        self._requests += 1
        count, all_done = f"{_DONE}count", f"{_DONE}{self._requests}"
        if self._store.add(count, 1) == self._requests * self._ranks:
            self._store.set(all_done, "")
            return lambda: None
        # The request's own time limit is that of whoever asked.
        return lambda: self._store.wait([all_done], timedelta(days=1))

    def clear(self) -> None:
        """Remove what process groups left there: another one would take it for its own. Called by all ranks together.

        In a torch without ``list_keys`` nothing can be removed; ``used`` tells then.
        """
        self._times += 1
        done = f"{_CLEARED}{self._times}"
        if self._rank == 0:
            for key in set(self._store.list_keys()) - self._agents if self._listed else ():
                # A slower rank still waits for one of these.
                if not key.startswith((_CLEARED, _DONE)):
                    self._store.delete_key(key)
            self._store.set(done, "")
        self._store.wait([done])

    def used(self) -> bool:
        """Whether there are keys that ``clear`` cannot remove."""
        return not self._listed and self._store.num_keys() > self._keys + self._times + self._requests + 1


class Kept:
    """What of this process outlives a request; ``directory`` is that of its run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = Store()
        self.group: Any = None
        self._counted = 0
        self._sound = True
        self.at_end: list[Callable[[], None]] = []
        self.looks = Looks()
        #: ``sys.path`` as it is between two requests.
        self.path = list(sys.path)

    def settle(self) -> None:
        """Take this process as it is now for what requests are to leave it: what came until now was no test's doing."""
        self.looks.start_again()
        self.path = list(sys.path)

    def process_group(self, backend: str) -> Any:
        """The default process group, made by the first request that asks for it."""
        from torch import distributed

        if self.group is None:
            distributed.init_process_group(backend)
            self.group = distributed.group.WORLD
        return self.group

    def without_group(self) -> None:
        """Leave no process group to a request that may make its own. Called by all ranks together."""
        if self.group is not None:
            if not self._destroy_group(DESTROYED):
                raise RuntimeError(
                    f"the process group that tests share could not be destroyed within {DESTROYED:g} s: "
                    "an earlier test left a collective unfinished"
                )
            self.store.clear()

    def leave_group(self) -> None:
        """Before this process ends. A group that is not sound is left to its end: to destroy it could last for ever."""
        if self.group is not None and not (self._sound and self._destroy_group(DESTROYED_AT_END)):
            # A rank that was forked ends so anyway; one that was spawned would have the interpreter destroy the group.
            atexit.register(os._exit, 0)
            atexit.register(rank.flush)

    def _destroy_group(self, seconds: float) -> bool:
        """Whether that took no longer."""
        from torch import distributed

        self.group = None
        problems: list[BaseException] = []

        def destroy() -> None:
            try:
                distributed.destroy_process_group()
            except BaseException as error:  # whatever it is, it is raised below
                problems.append(error)

        # A thread can be left behind where it hangs; the end of the process does not wait for it.
        thread = threading.Thread(target=destroy, name="distcompat: destroys the process group", daemon=True)
        thread.start()
        thread.join(seconds)
        for problem in problems:
            raise problem
        return not thread.is_alive()

    def prove(self, begun: Callable[[float], bool], seconds: float) -> bool:
        """Whether the group is sound, by what ``begin_proof`` gave."""
        self._sound = begun(seconds)
        return self._sound

    def begin_proof(self) -> Callable[[float], bool]:
        """Have the process group do something; what it gives waits so long for that, and says whether it was done rightly.

        The group must be ours, and still do what it should: a collective left half done would show. All ranks must have
        done the request.
        """
        # A test may have left another default, or a mode, or a function of its own in the place of torch's, which do anything,
        # or no torch.
        try:
            import torch
            from torch import distributed

            if self.group is None or not distributed.is_initialized():
                there = self.group is not None or distributed.is_initialized()
                return lambda _: not there
            if distributed.group.WORLD is not self.group:
                return lambda _: False
            self._counted += 1
            expected = float(self._counted * distributed.get_world_size())
            device = "cpu" if distributed.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
            count = torch.full((), float(self._counted), dtype=torch.float32, device=device)
            work = distributed.all_reduce(count, async_op=True)
        except Exception:
            return lambda _: False

        def sound(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
                return bool(count.item() == expected)
            except Exception:
                return False

        return sound


#: Set in ranks that live on.
kept: Kept | None = None


def serve(payload: Mapping[str, Any], log: RankLog) -> None:
    """Do the requests that come over the socket ``payload["socket"]``, a line each, until it is closed.

    A request that fails ends this process, as it ends any rank. After any other, tell what it left changed.
    """
    global kept  # noqa: PLW0603 - whoever runs in this process asks for it
    kept = Kept(log.path.parent)
    asked: list[Request] = []
    try:
        _serve(kept, payload["socket"], log.rank, asked)
    except BaseException as error:
        # Whoever asked reads the log of what he asked for; that of this run, to which it is on its way, tells the next one.
        if asked:
            with contextlib.closing(RankLog(asked[-1].directory, log.rank)) as last:
                rank.tell(last, error)
        raise


def _serve(kept: Kept, place: str, number: int, asked: list[Request]) -> None:
    """As ``serve``; ``asked`` gets the requests."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(place)
        for line in channel.makefile("r", encoding="utf-8"):
            asked[:] = [Request.from_line(line)]
            changed = _one(kept, asked[-1])
            channel.sendall(f"{pristine_builtins.encode({'rank': number, 'changed': changed})}\n".encode())
            # For the next one; now, for nobody waits for it.
            randomness.renew()
    for call in reversed(kept.at_end):
        call()
    kept.leave_group()


class Looks:
    """What is looked at to find what a request left: how this process was before it, and what may not grow too much."""

    def __init__(self) -> None:
        self._sizes = Sizes()
        self._wanted: tuple[object, ...] = ()
        self._before = ProcessState.now()

    def begin(self, request: Request) -> None:
        """Look at how this process is, which ``rank.prepare`` has brought to where the request wants it.

        The last request left it as it found it, or there would be no other: nothing to see, unless this one wants it elsewhere.
        """
        wanted = (request.set, request.unset, request.cwd, request.import_path)
        if wanted != self._wanted:
            self._wanted, self._before = wanted, ProcessState.now()

    def start_again(self) -> None:
        """Look again, for something else than a test has changed this process."""
        self._before = ProcessState.now()

    def changes(self) -> list[str]:
        """The names of what is not as it was, and of what has grown too much."""
        return ProcessState.now().changes(self._before) + self._sizes.grown()


def _one(kept: Kept, request: Request) -> list[str]:
    """Do one request; what it left changed."""
    if kept.group is None:
        kept.store.clear()
    with _back_afterwards(kept, request):
        rank.prepare(request)
        kept.looks.begin(request)
        rank.perform(request)
        # What comes next in this run's logs is the next request's.
        rank.flush()
        # Before all have, the proof would meet a collective of the request that nobody else joined, and let it pass.
        wait_for_all = kept.store.told_done()
        changed = _changes(kept.looks)
        wait_for_all()
        begun = kept.begin_proof()
    if not kept.prove(begun, min(HEALTHY, request.timeout * HEALTHY_PART)):
        changed.append("the process group")
    if kept.store.used():
        changed.append("the store of process groups")
    return changed


def _changes(looks: Looks) -> list[str]:
    """What the request left changed; that nobody can tell is a change too, for its own verdict stands."""
    try:
        return looks.changes()
    except Exception as error:
        return [f"what cannot be looked at ({rank.message_of(error)})"]


@contextlib.contextmanager
def _back_afterwards(kept: Kept, request: Request) -> Iterator[None]:
    """What ``prepare`` changes is as it was, for the next request, which says what it wants beside that."""
    touched = {name: os.environ.get(name) for name in (*request.set, *request.unset)}
    kept.path = list(sys.path)
    yield
    for name, value in touched.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = kept.path
