"""The main loop of a reused rank: run each request and report the state that it changed.

A reused rank is a process that runs one test after the other. It is started with ``serve`` as the
target of its request (``reused_ranks.SERVE``). Then lines of JSON go over a socket: pytest's
process sends a ``Request`` for each test, and the rank replies ``{"rank": 0, "changed": ["the
environment (FOO set to 'x')"]}`` when it has run it. ``reused_ranks`` is the counterpart in
pytest's process, and ends the ranks if anything has changed.

Between two requests the ranks also check the process group that tests share, and clear the store
(``store``), torchrun's server by which the ranks of a process group find each other.
"""

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

from pytest_distcompat.ext.reuse.process_state import changes, grown, sizes, state_now
from pytest_distcompat.ext.reuse.store import Store
from pytest_distcompat.launch import pristine_builtins, randomness, rank
from pytest_distcompat.launch.process import flush
from pytest_distcompat.launch.rank_log import RankLog
from pytest_distcompat.launch.request import Request

#: Time limits of the check of the process group: in seconds, and as a fraction of the request's own
#: limit; the shorter one counts. A slow check must not look like a request that hangs.
GROUP_CHECK_TIMEOUT_S = 5.0
GROUP_CHECK_PART_OF_LIMIT = 0.25
#: Time limit of destroying the process group, in seconds: it waits for collectives that a peer
#: never joins.
DESTROY_TIMEOUT_S = 5.0
#: The same at the end of the process. It is shorter, because that end destroys the group too.
DESTROY_TIMEOUT_AT_END_S = 1.0


class ReusedRank:
    """State that this process keeps between requests.

    Args:
        directory: The directory of the run with which the ranks were started.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = Store()
        #: The default process group that tests share; None until a test needs one.
        self.group: Any = None
        #: How many collectives have checked the group.
        self._group_checks = 0
        #: Whether the last check found the group in order.
        self.sound = True
        #: Functions to call when this process ends, the last one first: ``rank_item`` adds the
        #: teardown of pytest's session, for example.
        self.at_end: list[Callable[[], None]] = []
        #: Memory, threads, open files and children at the start, to see later what has grown.
        self._sizes = sizes()
        #: The environment, directory and import path of the last request.
        self._settings: tuple[object, ...] = ()
        self.reset_baseline()

    def reset_baseline(self) -> None:
        """Record the current state as the one to compare with later.

        ``rank_item`` calls it when this rank has collected the tests: no test has caused the
        changes so far, but the import of libraries, say.
        """
        self._baseline = state_now()
        #: What ``sys.path`` is put back to after a request: what collection has added stays.
        self.path = list(sys.path)

    def begin(self, request: Request) -> None:
        """Record the state after ``rank.prepare``, if the last request had other settings.

        With the same settings the recorded state is still right: a request that changes it ends the
        ranks.
        """
        settings = (request.set, request.unset, request.cwd, request.import_path)
        if settings != self._settings:
            self._settings = settings
            self._baseline = state_now()

    def changes(self) -> list[str]:
        """Return what the request has changed, and what has grown too much.

        For example ``["the environment (FOO set to 'x')", "memory"]``. State that cannot be read
        counts as a change. The outcome of the test itself stands in any case.
        """
        try:
            return changes(state_now(), self._baseline) + grown(self._sizes)
        except Exception as error:
            return [f"state that cannot be read ({rank.message_of(error)})"]

    def process_group(self, backend: str) -> Any:
        """Return the default process group; the first call creates it."""
        from torch import distributed

        if self.group is None:
            distributed.init_process_group(backend)
            self.group = distributed.group.WORLD
        return self.group

    def without_group(self) -> None:
        """Destroy the process group before a request that may make its own.

        All ranks call it together, by ``rank_item``, before a test without the shared group.
        """
        if self.group is None:
            return
        if not self._destroy_group(DESTROY_TIMEOUT_S):
            raise RuntimeError(
                "the process group that tests share could not be destroyed "
                f"within {DESTROY_TIMEOUT_S:g} s: an earlier test left a collective unfinished"
            )
        self.store.clear()

    def release_group(self) -> None:
        """Destroy the process group at the end of this process.

        A broken group is left alone, because to destroy it could hang. Then the process ends by
        ``os._exit``, so that the interpreter does not destroy the group either.
        """
        if self.group is None:
            return
        destroyed = self.sound and self._destroy_group(DESTROY_TIMEOUT_AT_END_S)
        if not destroyed:
            # A forked rank ends by os._exit anyway. A spawned one ends as any interpreter.
            # Functions of ``atexit`` are called in reverse order: first ``flush``.
            atexit.register(os._exit, 0)
            atexit.register(flush)

    def _destroy_group(self, seconds: float) -> bool:
        """Destroy the process group; return whether that took no longer than ``seconds``."""
        from torch import distributed

        self.group = None
        problems: list[BaseException] = []

        def destroy() -> None:
            try:
                distributed.destroy_process_group()
            except BaseException as error:  # raised again below
                problems.append(error)

        # A thread that hangs can be left behind: the end of the process does not wait for it.
        thread = threading.Thread(
            target=destroy, name="distcompat: destroys the process group", daemon=True
        )
        thread.start()
        thread.join(seconds)
        for problem in problems:
            raise problem
        return not thread.is_alive()

    def begin_group_check(self) -> Callable[[float], bool]:
        """Start a collective on the process group.

        Call it when all ranks have finished the request. A collective that the request left
        unmatched would pair with this one.

        Returns:
            A function that takes a number of seconds. It waits so long at most, and returns whether
            the group is the original one and the collective gave the right result.
        """
        # A test may have replaced the default group, a mode or a function of torch, so any of these
        # calls may raise.
        try:
            import torch
            from torch import distributed

            if self.group is None or not distributed.is_initialized():
                # In order if there was no group and there is none.
                appeared_or_vanished = self.group is not None or distributed.is_initialized()
                return lambda _: not appeared_or_vanished
            if distributed.group.WORLD is not self.group:
                return lambda _: False
            self._group_checks += 1
            check_number = float(self._group_checks)
            # Each rank contributes the number of the check, so a collective that was left over from
            # an earlier check gives another sum.
            expected = check_number * distributed.get_world_size()
            device = torch.device("cpu")
            if distributed.get_backend() != "gloo":
                device = torch.device("cuda", torch.cuda.current_device())
            count = torch.full((), check_number, dtype=torch.float32, device=device)
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


#: This process, if it is a reused rank; None in all other processes.
reused: ReusedRank | None = None


def serve(payload: Mapping[str, Any], log: RankLog) -> None:
    """Run the requests that arrive on a socket, until it is closed.

    A request that fails ends this process, as it ends any rank. After any other, the rank replies
    with what the request has changed.

    Args:
        payload: ``{"socket": path}``.
        log: The log of the run with which the ranks were started. Each request has a log of its
            own.
    """
    global reused  # noqa: PLW0603 - what runs in this process looks it up here
    reused = ReusedRank(log.path.parent)
    requests: list[Request] = []
    try:
        _serve(reused, payload["socket"], log.rank, requests)
    except BaseException as error:
        # The parent reads the log of the last request. The error also goes up to the log of this
        # run; if no request waits for it, the user gets it as a notice with the next one.
        if requests:
            with contextlib.closing(RankLog(requests[-1].directory, log.rank)) as last:
                rank.report_error(last, error)
        raise


def _serve(reused: ReusedRank, socket_path: str, number: int, requests: list[Request]) -> None:
    """Run the requests.

    Args:
        reused: The state of this process.
        socket_path: The socket.
        number: This rank.
        requests: Gets the request that runs or ran last, as its only item, for the caller to read
            after an exception.
    """
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(socket_path)
        for line in channel.makefile("r", encoding="utf-8"):
            # ``pristine_builtins`` decodes and encodes JSON even if a test has replaced functions.
            requests[:] = [Request(**pristine_builtins.decode(line))]
            changed = _perform(reused, requests[-1])
            channel.sendall(
                f"{pristine_builtins.encode({'rank': number, 'changed': changed})}\n".encode()
            )
            # Random generators as those of a fresh process, for the next request. It is done now
            # because no process waits for this one.
            randomness.renew()
    for call in reversed(reused.at_end):
        call()
    reused.release_group()


def _perform(reused: ReusedRank, request: Request) -> list[str]:
    """Run one request; return the names of the state that it changed."""
    # While there is a shared group its keys are needed. Without one a test may make its own.
    if reused.group is None:
        reused.store.clear()
    with _restored_afterwards(reused, request):
        # Set the environment, working directory and import path of the request; then call its
        # target, which runs the test and logs how it ended.
        rank.prepare(request)
        reused.begin(request)
        rank.perform(request)
        # What is still buffered would be written later, as if it were output of the next request.
        flush()
        # The check starts only when all ranks have finished the request, so that it cannot pair
        # with a collective that a test left unmatched.
        # ``announce_done`` returns a function that waits until all ranks have called it.
        wait_for_all = reused.store.announce_done()
        changed = reused.changes()
        wait_for_all()
        check = reused.begin_group_check()
    limit = min(GROUP_CHECK_TIMEOUT_S, request.timeout * GROUP_CHECK_PART_OF_LIMIT)
    reused.sound = check(limit)
    if not reused.sound:
        changed.append("the process group")
    if reused.store.has_leftover_keys():
        changed.append("the store of process groups")
    return changed


@contextlib.contextmanager
def _restored_afterwards(reused: ReusedRank, request: Request) -> Iterator[None]:
    """Undo, after the block, the environment and import path that ``rank.prepare`` sets.

    The next request brings its own settings.
    """
    touched = {}
    for name in (*request.set, *request.unset):
        touched[name] = os.environ.get(name)
    reused.path = list(sys.path)
    yield
    for name, value in touched.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = reused.path
