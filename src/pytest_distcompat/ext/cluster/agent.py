"""The node agent: runs its node's part of each run that spans nodes.

It joins pytest's process, and keeps a warm launcher process.

The ranks' logs are written below a directory of this node, and streamed to pytest's process. What
ranks of other nodes log that ranks here or the watchdog must know comes back the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import shutil
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pytest_distcompat import clock
from pytest_distcompat.decode import decode
from pytest_distcompat.ext.cluster.channel import Channel, NotProvedError
from pytest_distcompat.ext.cluster.facts import facts
from pytest_distcompat.ext.cluster.own_disks import on_node
from pytest_distcompat.ext.cluster.place import Place
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch.files import recorded_files, written
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.process import die_with_parent
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.launch.temporary import OwnedDirectory
from pytest_distcompat.launch.warm import WarmLauncher
from pytest_distcompat.lease import Inventory, Lease, Pool, cpu_slots, gpus
from pytest_distcompat.lease.pool import boot_id
from pytest_distcompat.lease.timeline import read_timeline
from pytest_distcompat.leased import LeasedLauncher, rank_environment
from pytest_distcompat.run_paths import SuitePayload

#: How often a node agent says that it runs, and how often logs are streamed, in seconds.
HEARTBEAT_S, STREAM_S = 1.0, 0.02
#: How long an agent that a signal ends waits until it has said so, in seconds.
SAID_S = 1.0


def join(
    host: str, port: int, token: bytes, name: str, wait: float, *, with_parent: bool = False
) -> int:
    """Join the pytest session that listens there, and serve it to its end. Return the exit code.

    Raises:
        UsageProblem: The session cannot be joined; the message says why.
    """
    if with_parent:
        die_with_parent()
    channel = _connect(host, port, token, wait)
    channel.send({"name": name, "pid": os.getpid(), "boot": boot_id()})
    welcome = channel.receive()
    if "refused" in welcome:
        raise UsageProblem(f"{name}: {welcome['refused']}")
    agent = _Agent(channel, welcome)
    try:
        agent.serve()
    except _EndedError:
        return agent.exit_code
    finally:
        agent.close()


def _connect(host: str, port: int, token: bytes, wait: float) -> Channel:
    """Connect, perhaps before pytest listens."""
    deadline = clock.now() + wait
    while True:
        try:
            return Channel(socket.create_connection((host, port), timeout=5), token, serves=False)
        except NotProvedError as error:
            raise UsageProblem(f"{host}:{port}: {error}") from None
        except OSError as error:
            if clock.now() > deadline:
                problem = f"no session to join in {wait:g} s ({error})"
                raise UsageProblem(f"{host}:{port}: {problem}") from None
            clock.sleep(0.2)


class _EndedError(BaseException):
    """A signal ends the agent."""


class _Agent:
    #: What the process ends with: 0 once the session has closed, else 1.
    exit_code = 1

    def __init__(self, channel: Channel, welcome: dict[str, Any]) -> None:
        self._channel = channel
        self._environment = dict(os.environ)
        os.chdir(welcome["cwd"])
        device = welcome["device"]
        self._facts = facts(welcome["root"], welcome["warmth"]["own"], device)
        self._launcher = WarmLauncher(decode(Warmth, welcome["warmth"]), device=device)
        self._owned = OwnedDirectory()
        self._spans = self._owned.path / "leases"
        self._welcome = welcome
        #: The GPUs that a scheduler gave the run; none if it gave none.
        self._given: tuple[str, ...] = ()
        pools = functools.cache(self._pool)
        self._leased = LeasedLauncher(self._launcher, lambda: pools(self._given), self._say)
        self._session = self._owned.path / "session.json"
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._run = Path()
        self._stopped = threading.Event()
        #: Whether the session is over, or cannot be reached any more.
        self._over = False
        self._leaving = threading.Event()
        self._said = threading.Event()

    def serve(self) -> NoReturn:
        """Do what pytest's process sends, until a signal ends the process."""
        signal.signal(signal.SIGTERM, self._end)
        threading.Thread(target=self._receive, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        facts_now = {**self._facts, "wall": clock.wall()}
        self._channel.send({"is": "facts", "facts": facts_now})
        while True:
            message = self._messages.get()
            if message["do"] == "warm":
                self._session.write_text(message["session"], encoding="utf-8")
                self._launcher.warm_up()
            elif message["do"] == "get_warm":
                self._channel.send({"is": "warm", "problem": self._launcher.get_warm()})
            elif message["do"] == "write":
                problem = _problem_of_writing(Path(message["path"]))
                self._channel.send({"is": "written", "problem": problem})
            elif message["do"] == "run":
                try:
                    part = self._part(message)
                except (OSError, UsageProblem) as error:
                    # A full disk, say, or a GPU that a scheduler counts and NVML does not.
                    part = {
                        "is": "ended",
                        "processes": {},
                        "known": {"launch_error": str(error)},
                        "output": {},
                    }
                self._channel.send(part)

    def _pool(self, given: tuple[str, ...]) -> Pool:
        """Return the pool of this node's devices, or of those given.

        Agents of other workers and sessions lease from it too.
        """
        welcome = self._welcome
        # GPUs that a scheduler gave the run are the run's alone.
        runs_share = welcome["runs_share"] and not given
        if welcome["device"] == "cuda":
            inventory = gpus(welcome["gpus"], welcome["ranks_each"], given, runs_share=runs_share)
        else:
            inventory = cpu_slots()
        return Pool(
            None, inventory, timeline=self._spans, session=welcome["timeline"], notify=self._say
        )

    def _say(self, text: str) -> None:
        self._channel.send({"is": "waits", "text": text})

    def _part(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run this node's part of a run, and return how it ended."""
        self._set_environment(message)
        self._run = self._owned.path / message["id"]
        self._run.mkdir()
        self._given = tuple(message["gpus"])
        request = self._request(message)
        devices: tuple[str, ...] = ()
        if not message["place"]:
            ending = self._stream_run(self._leased, request)
        else:
            if self._given:
                shown = gpus(wanted=self._given)
                devices = shown.ids
                request = _on_given_gpus(request, shown)
            place = Place(**message["place"])
            self._launcher.listens = lambda port: self._channel.send(
                {"is": "listens", "store": [place.address, port]}
            )
            ending = self._stream_run(self._launcher, request)
        part = self._part_that_ended(request, ending)
        part["devices"] = devices
        shutil.rmtree(self._run, ignore_errors=True)
        return part

    def _set_environment(self, message: Mapping[str, Any]) -> None:
        """Have the environment of the session's process, as far as its tests have changed that."""
        os.environ.clear()
        os.environ.update({**self._environment, **message["set"]})
        for variable in message["unset"]:
            os.environ.pop(variable, None)

    def _request(self, message: Mapping[str, Any]) -> Request:
        """Return the request of this node's part, with directories of this node."""
        payload = dict(message["request"]["payload"])
        if "session" in payload:
            payload |= {"session": str(self._session), "directory": str(self._run)}
        if payload.get("own_disks"):
            directory = Path(message["request"]["directory"])
            own = on_node(decode(SuitePayload, payload), directory, self._owned.path / "runs")
            payload = dataclasses.asdict(own)
        fields = {
            **message["request"],
            "payload": payload,
            "directory": str(self._run),
            "place": message["place"],
        }
        return Request(**fields)

    def _stream_run(self, launcher: Launcher | WarmLauncher, request: Request) -> Ending:
        """Run the request, and send what its ranks log meanwhile."""
        streaming = threading.Thread(target=self._stream, args=(request,), daemon=True)
        self._stopped.clear()
        streaming.start()
        try:
            return launcher.run(request)
        finally:
            self._stopped.set()
            streaming.join()

    def _part_that_ended(self, request: Request, ending: Ending) -> dict[str, Any]:
        """Return what pytest's process needs to know of how this part ended."""
        part: dict[str, Any] = {"is": "ended", "processes": {}}
        part["leaks"] = ending.leaks
        part["known"] = {"launch_error": ending.launch_error}
        watch = self._launcher.watch
        if watch is not None:
            part["known"] = watch.known
            for rank, process in watch.processes.items():
                part["processes"][rank] = dataclasses.asdict(process)
        part["spans"] = [dataclasses.asdict(span) for span in read_timeline(self._spans)]
        shutil.rmtree(self._spans, ignore_errors=True)
        part["output"] = {}
        for rank in request.here:
            output = written(self._run, rank, request.here.start)
            part["output"][rank] = dict(output)
        part["recorded"] = {}
        for path in recorded_files(self._run):
            part["recorded"][path.name] = path.read_text(encoding="utf-8")
        return part

    def _stream(self, request: Request) -> None:
        """Send whole lines of the ranks' logs as they are written."""
        sent = dict.fromkeys(request.here, 0)
        last = False
        while not last:
            last = self._stopped.wait(STREAM_S)
            for rank, offset in sent.items():
                with (
                    contextlib.suppress(FileNotFoundError),
                    (self._run / f"rank-{rank}.jsonl").open("rb") as file,
                ):
                    file.seek(offset)
                    raw = file.read()
                    lines = raw[: raw.rfind(b"\n") + 1]
                    if lines:
                        sent[rank] += len(lines)
                        self._channel.send(
                            {"is": "log", "rank": rank, "lines": lines.decode("utf-8", "replace")}
                        )

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if message["do"] == "time":
                    self._channel.send({"is": "time", "now": clock.now()})
                elif message["do"] == "log":
                    with (
                        contextlib.suppress(OSError),
                        (self._run / f"rank-{message['rank']}.jsonl").open(
                            "a", encoding="utf-8"
                        ) as file,
                    ):
                        file.write(message["lines"])
                elif message["do"] == "stop":
                    if self._launcher.watch is not None:
                        self._launcher.watch.stopped = message["why"]
                elif message["do"] == "close":
                    self.exit_code = 0
                    break
                else:
                    self._messages.put(message)
        except (OSError, NotProvedError):
            pass
        # Without the session nothing may go on here, a run that it interrupted least of all. The
        # main thread ends what it has started.
        self._over = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._channel.send({"is": "beat"})
                if self._leaving.wait(HEARTBEAT_S):
                    self._channel.send({"is": "leaving", "why": "its agent got SIGTERM"})
                    break
        self._said.set()

    # The arguments are those of any handler of signals.
    def _end(self, number: int, frame: object) -> NoReturn:  # noqa: ARG002
        # Once: a second signal must not interrupt what ends the processes.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not self._over:
            # Before ranks end, which those of other nodes notice. The other thread sends it: this
            # one may be sending right now.
            self._leaving.set()
            self._said.wait(SAID_S)
        raise _EndedError

    def close(self) -> None:
        """End the launcher process and all below it."""
        self._launcher.close()
        self._channel.close()
        self._owned.remove()


def _on_given_gpus(request: Request, shown: Inventory) -> Request:
    """Return the request for ranks that see these GPUs alone, which a scheduler gave the run."""
    # Free by the scheduler's count, so that nothing has to be waited for.
    lease = Lease(shown.ids, shown.environment(shown.ids))
    variables = rank_environment(lease, len(request.here))
    return dataclasses.replace(request, set={**request.set, **variables})


def _problem_of_writing(path: Path) -> str:
    """Make a file, which pytest's process is to see; return what went wrong."""
    try:
        path.touch()
    except OSError as error:
        return str(error.strerror)
    return ""
