"""The ranks of somebody's launch, phase by phase in step: each says how it went, rank 0 says what that comes to."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import connections
from pytest_distcompat.launch.collectives import standing
from pytest_distcompat.launch.flight_recorder import dumps
from pytest_distcompat.launch.process import alive
from pytest_distcompat.launch.rank import GRACE
from pytest_distcompat.launch.standstill import Standstill, in_torch, may_wait_for_work
from pytest_distcompat.plugin.inside.agreement import STUCK, Said, agree
from pytest_distcompat.plugin.inside.store_client import POLL, StoreClient
from pytest_distcompat.plugin.inside.termination import Termination
from pytest_distcompat.plugin.marked.outcome import Outcome

#: How long ranks may take to say something after they should have, in seconds: they may be busy, or dying.
PATIENCE = 10.0
#: How long a rank may go on once the launch is being ended (torchrun kills after 30 s).
LEAVING = 3.0
#: How long rank 0 may take to write its reports, in seconds.
TELLING = 60.0


#: How a rank leaves a phase badly if its test allows that.
EXCUSED = ("skipped", "xfailed")


class Gone(Exception):
    """Rank 0 is gone, or does not answer: there is nobody to agree with."""


@dataclasses.dataclass
class Step:
    """The phase that this rank is in: ``number`` and ``place`` are the same on all ranks, ``deadline`` its own (monotonic)."""

    number: int
    place: str
    deadline: float
    limit: float
    said: bool = False
    cut: bool = False
    standstill: Standstill = dataclasses.field(default_factory=Standstill)
    stands: bool = False


class Lockstep:
    """This rank's end. ``overrun`` is called in a thread when this rank's phase does not come to its end; it ends the process."""

    def __init__(
        self, rank: int, size: int, termination: Termination, overrun: Callable[[Outcome | None], None]
    ) -> None:
        self.rank, self.size = rank, size
        self.termination = termination
        self._overrun = overrun
        self._host = socket.gethostname()
        self._port = int(os.environ["MASTER_PORT"])
        self._store_client = StoreClient(rank, size)
        self._ours = connections.of_store(self._port)
        self._lock = threading.Lock()
        self._step: Step | None = None
        self._number = 0
        #: What is put on the board in each phase.
        self._names = ("bad", "out", "told", *range(size), *(f"stands/{rank}" for rank in range(size)))
        self.pids: dict[int, int] = {}
        self._hosts: dict[int, str] = {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="distcompat-lockstep", daemon=True)

    # Once.

    def meet(self, about: Any, timeout: float) -> dict[int, Any]:
        """What every rank has to say of itself. Raises Gone after ``timeout`` seconds."""
        own = {"pid": os.getpid(), "host": self._host, "about": about}
        self._store_client.put(f"meet/{self.rank}", json.dumps(own))
        self._watcher.start()
        found = {}
        deadline = clock.now() + timeout
        for rank in range(self.size):
            text = self._await(f"meet/{rank}", deadline, patience=LEAVING)
            if text is None:
                since = self.termination.since
                why = "ended before it had collected its tests" if since else f"has collected no tests in {timeout:g} s"
                raise Gone(f"rank {rank} {why}")
            said = json.loads(text)
            self.pids[rank], self._hosts[rank] = said["pid"], said["host"]
            found[rank] = said["about"]
        return found

    def leave(self, status: int) -> int:
        """The end of the session: this rank's exit status made no better than any other's."""
        self._closing.set()
        self._store_client.put(f"left/{self.rank}", str(status))
        deadline = clock.now() + PATIENCE
        found = [self._await(f"left/{rank}", deadline, of=rank) for rank in range(self.size)]
        return status or next((int(text or 1) for text in found if text != "0"), 0)

    def close(self) -> None:
        """The last thing that is done: wait until rank 0 has told all it knows. From then on this process ends by itself."""
        self.termination.ignore()
        if self.rank == 0:
            self._store_client.put("told", "")
        else:
            self._await("told", clock.now() + TELLING, of=0)

    @property
    def within(self) -> bool:
        """Whether this rank is in a phase."""
        return self._step is not None

    # Phase by phase.

    def begin(self, place: str, deadline: float, limit: float) -> None:
        """This rank enters a phase."""
        with self._lock:
            self._number += 1
            self._step = Step(self._number, place, deadline, limit)

    def end(self, phase: dict[str, Any], *, group: bool) -> tuple[Outcome, bool, bool]:
        """This rank has ended it so: what that comes to, whether connections were cut, whether the session cannot go on.

        Raises Gone.
        """
        step = self._step
        assert step is not None
        said = Said(self.rank, step.place, clock.now(), phase, group=group)
        if not self._say(step, said):
            # The time limit came first: the watcher ends this process.
            threading.Event().wait()
        if self.rank == 0:
            answer = self._conclude(step)
        else:
            text = self._await(f"{step.number}/out", step.deadline + 2 * PATIENCE, of=0)
            if text is None:
                raise Gone("rank 0 does not answer any more")
            answer = json.loads(text)
        self._step = None
        return Outcome.from_json(answer["outcome"]), bool(answer["cut"]), bool(answer["over"])

    def told(self, make: Callable[[], str]) -> str:
        """What rank 0 makes, on all ranks; once a phase."""
        step = self._step
        assert step is not None
        key = f"{step.number}/told"
        if self.rank == 0:
            self._store_client.put(key, make())
        text = self._await(key, step.deadline, of=0)
        if text is None:
            raise Gone("rank 0 does not answer any more")
        return text

    def _say(self, step: Step, said: Said) -> bool:
        """Whether this was the first word on that phase."""
        with self._lock:
            if step.said:
                return False
            step.said = True
            if said.bad:
                self._store_client.put(f"{step.number}/bad", said.bad)
            self._store_client.put(f"{step.number}/{self.rank}", dataclasses.replace(said, cut=step.cut).to_text())
        return True

    def _conclude(self, step: Step) -> dict[str, Any]:
        """Rank 0: wait for all, and tell all."""
        said: dict[int, Said] = {}
        while len(said) < self.size:
            for rank in set(range(self.size)) - set(said):
                if text := self._store_client.get(f"{step.number}/{rank}"):
                    said[rank] = Said(**json.loads(text))
            missing = set(range(self.size)) - set(said)
            late = clock.now() > step.deadline + PATIENCE or self.termination.since > LEAVING / 2
            gone = [
                rank for rank in missing if self._is_gone(rank) or self._store_client.get(f"left/{rank}") is not None
            ]
            if late or self._store_client.lost or (gone and len(gone) == len(missing)):
                break
            clock.sleep(POLL)
        lost = {rank: one.place for rank, one in said.items() if one.place != step.place}
        with tempfile.TemporaryDirectory(prefix="distcompat-") as directory:
            outcome = agree(Path(directory), said, self.pids, step.limit)
        if lost:
            told = "; ".join(f"rank {rank} is at {place}" for rank, place in lost.items())
            outcome = Outcome(
                "failed", f"ranks do not run the same tests: rank 0 is at {step.place}; {told}", hard=True
            )
        over = bool(lost) or len(said) < self.size or any(one.stuck for one in said.values())
        if not any(one.group for one in said.values()):
            self._store_client.clear()
        answer = {"outcome": outcome.to_json(), "over": over, "cut": any(one.cut for one in said.values())}
        self._store_client.put(f"{step.number}/out", json.dumps(answer))
        self._store_client.forget(f"{step.number - 1}/{name}" for name in self._names)
        return answer

    def _await(self, key: str, deadline: float, *, of: int | None = None, patience: float = PATIENCE) -> str | None:
        """The key's text. None after the deadline, so long after the launch began to end, or if the rank ``of`` is gone."""

        def hopeless() -> bool:
            return self.termination.since > patience or (of is not None and self._is_gone(of))

        return self._store_client.wait(key, deadline, hopeless)

    def _is_gone(self, rank: int) -> bool:
        return self._hosts.get(rank) == self._host and not alive(self.pids[rank])

    # The watcher's thread.

    def _watch(self) -> None:
        while not self._closing.is_set():
            self.termination.wait(5 * POLL)
            step = self._step
            if step is None or step.said:
                if self.termination.since > 2 * PATIENCE:
                    self._overrun(None)
                continue
            leaving = self.termination.since > LEAVING
            why = self._store_client.get(f"{step.number}/bad")
            if why in EXCUSED and self._all_stand(step):
                self._release(step)
            elif why is not None and why not in {STUCK, *EXCUSED}:
                self._release(step, GRACE)
            # A rank whose own limit was a little earlier says that it is stuck: so is who waits for it, and must be seen waiting.
            if clock.now() > step.deadline or why == STUCK or leaving:
                said = Said(self.rank, step.place, clock.now(), stuck=not leaving, stack=_stacks())
                if self._say(step, said):
                    self._give_up(step)

    def _give_up(self, step: Step) -> None:
        """The main thread will not come back: have told what is known, and end this process."""
        if self.rank == 0:
            self._overrun(Outcome.from_json(self._conclude(step)["outcome"]))
        self._await(f"{step.number}/out", clock.now() + 2 * PATIENCE, of=0)
        self._store_client.put(f"left/{self.rank}", "1")
        self.close()
        self._overrun(None)

    def _all_stand(self, step: Step) -> bool:
        """Return whether all ranks that have not left the phase wait in torch: then for those that have, as the test allows.

        Each sees it of itself. As long as one of them is at work, it may still come to another end.
        """
        stands = step.standstill.look([os.getpid()], _waits_in_torch)
        if stands != step.stands:
            step.stands = stands
            self._store_client.put(f"{step.number}/stands/{self.rank}", "yes" if stands else "")
        others = set(range(self.size)) - {self.rank}
        return stands and all(
            self._store_client.get(f"{step.number}/{rank}") or self._store_client.get(f"{step.number}/stands/{rank}")
            for rank in others
        )

    def _release(self, step: Step, grace: float = 0.0) -> None:
        """Let this rank wait no longer for one that has left the phase badly, once others had time to do so themselves."""
        if step.cut:
            return
        clock.sleep(grace)
        with self._lock:
            if not step.said:
                step.cut = True
                peers = {pid for rank, pid in self.pids.items() if self._hosts[rank] == self._host} - {os.getpid()}
                connections.cut(peers, self._port, self._ours)


def _waits_in_torch() -> bool:
    """Return whether the main thread of this process, which sleeps, waits for other ranks."""
    stack = _stacks()
    if in_torch(stack) or not may_wait_for_work(os.getpid(), stack):
        return in_torch(stack)
    # A line of the user's may call what waits in C++, which leaves nothing in the stack.
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\n".join(dump().strip() for dump in dumps()))
        file.flush()
        found = standing(Path(file.name), stack)
    return found is not None and found.unfinished is not None


def _stacks() -> str:
    """The stacks of all threads of this process but this one, which faulthandler writes first."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().partition("\n\n")[2]
