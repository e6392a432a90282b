"""The node agent: the process that runs one node's ranks in a session over several nodes.

A *node* is a machine of the session. A *run* is one process group from start to end; its *ranks*
are the processes that train or test together, and each node has a part of them. ``distcompat join
HOST:PORT`` (``command``) calls ``join`` here: a user, Slurm or Ray starts that on each node. The
agent connects to pytest's process by a ``Channel``, which carries JSON, and does what that process
sends until the session ends.

pytest's process (``membership``, ``node``, ``run``) sends:

- ``{"do": "warm"}`` and ``get_warm``: start the launcher process, which imports torch and then
  forks ranks fast, and wait until it is ready;
- ``write``: make a file in the shared directory;
- ``run``: run this node's part, with the request and this node's place in it (``_part``);
- ``log``: lines that ranks of other nodes logged;
- ``time``, ``stop``, ``close``: return the clock's time, end the current part, end the session.

The agent sends ``{"is": "facts"}`` (versions, files, clock) when it has joined, an answer of its
own kind to each of these (``warm``, ``written``, ``time``), and during a run ``listens`` (the port
on which the nodes meet), ``log``, ``waits`` (for devices) and in the end ``ended``. A ``beat`` each
second says that it lives, ``leaving`` that a signal ends it.

Three threads share the work: the main thread does one thing after the other, ``_receive`` takes
what must not wait for a run to end, and ``_beat`` sends the beats. Ranks write their logs to files
below a directory of this node; ``_stream`` sends new lines to pytest's process as they come.

A *lease* gives a run devices of this node, and keeps other runs off them. If runs span nodes,
pytest's process sees to that. If this node has whole runs (``--distcompat-worker-nodes``), the
agent leases for each.
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
    """Join the pytest session that listens there, and serve it to its end.

    Args:
        host: Where pytest's process listens.
        port: Its port.
        token: The secret of the session, which both sides must know.
        name: The name of this node in verdicts, such as ``n1``.
        wait: How long to try to connect, in seconds: pytest may start later.
        with_parent: Whether to end when the parent process ends, which may be killed.

    Returns:
        The exit code: 0 if the session has ended, 1 if a signal or a lost session ended the agent.

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
    """Connect; try again for ``wait`` seconds while nobody listens."""
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
    """A signal ends the agent: raised by the signal's handler, wherever the main thread is."""


class _Agent:
    """The agent after it has joined.

    Args:
        channel: The connection to pytest's process.
        welcome: What the session needs of this node: its working directory ``cwd``, ``device``,
            repository ``root``, what the launcher process imports (``warmth``), and how runs lease
            devices (``gpus``, ``ranks_each``, ``runs_share``, ``timeline``).
    """

    #: What the process ends with: 0 once the session has closed, else 1.
    exit_code = 1

    def __init__(self, channel: Channel, welcome: dict[str, Any]) -> None:
        self._channel = channel
        #: The environment of this process when it started, to which each run adds its own.
        self._environment = dict(os.environ)
        os.chdir(welcome["cwd"])
        device = welcome["device"]
        self._facts = facts(welcome["root"], welcome["warmth"]["own"], device)
        #: Starts ranks on this node.
        self._launcher = WarmLauncher(decode(Warmth, welcome["warmth"]), device=device)
        #: The directory of this agent on this node, removed at its end.
        self._owned = OwnedDirectory()
        #: Where leases of devices are recorded until pytest's process gets them.
        self._spans = self._owned.path / "leases"
        self._welcome = welcome
        #: The GPUs that a scheduler gave the run, as CUDA_VISIBLE_DEVICES names them: ``("0",
        #: "1")``; none if it gave none.
        self._given: tuple[str, ...] = ()
        # GPUs that a scheduler gave -> the pool of these, or of all GPUs if none were given.
        pools = functools.cache(self._pool)
        #: Starts ranks too, once it has leased devices of this node from a pool.
        self._leased = LeasedLauncher(self._launcher, lambda: pools(self._given), self._say)
        #: The file that describes the session to ranks.
        self._session = self._owned.path / "session.json"
        #: What pytest's process has sent for the main thread.
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        #: The directory of the current run.
        self._run = Path()
        #: Set when the current part has ended, so that ``_stream`` sends the rest and stops.
        self._stopped = threading.Event()
        #: Whether the session is over, or cannot be reached any more.
        self._over = False
        #: Set when a signal ends the agent; ``_beat`` then sends that.
        self._leaving = threading.Event()
        #: Set when that is sent.
        self._said = threading.Event()

    def serve(self) -> NoReturn:
        """Do what pytest's process sends, one thing after the other, until a signal ends that.

        When the session is over, ``_receive`` sends this process such a signal itself.
        """
        signal.signal(signal.SIGTERM, self._end)
        threading.Thread(target=self._receive, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        # The wall clock, by which pytest's process compares the clocks of the machines.
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
                self._channel.send(self._part_or_problem(message))

    def _part_or_problem(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run this node's part of a run; return how it ended, or why it could not start."""
        try:
            return self._part(message)
        except (OSError, UsageProblem) as error:
            # A full disk, say, or a GPU that a scheduler counts and NVML does not.
            return {
                "is": "ended",
                "processes": {},
                "known": {"launch_error": str(error)},
                "output": {},
            }

    def _pool(self, given: tuple[str, ...]) -> Pool:
        """Return the pool of this node's devices, or of the GPUs that a scheduler gave the run.

        A pool lends each device to one run at a time. Agents of other workers and sessions on this
        node lease from it too.
        """
        welcome = self._welcome
        # GPUs that a scheduler gave the run are the run's alone.
        runs_share = welcome["runs_share"] and not given
        if welcome["device"] == "cuda":
            inventory = gpus(welcome["gpus"], welcome["ranks_each"], given, runs_share=runs_share)
        else:
            inventory = cpu_slots()
        # None: the locks are in the default directory, which all processes of the machine share.
        return Pool(
            None, inventory, timeline=self._spans, session=welcome["timeline"], notify=self._say
        )

    def _say(self, text: str) -> None:
        """Have pytest's process show the user what a run waits for."""
        self._channel.send({"is": "waits", "text": text})

    def _part(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run this node's part of a run, and return the message that says how it ended.

        Args:
            message: ``request``, a ``Request`` as a dict; ``place``, the fields of ``Place``, which
                say which of the run's nodes this is and where they meet (empty if this node has the
                whole run); ``set`` and ``unset``, changes of the environment; ``gpus`` that a
                scheduler gave; and ``id``, a name for the run's directory.
        """
        self._set_environment(message)
        self._run = self._owned.path / message["id"]
        self._run.mkdir()
        self._given = tuple(message["gpus"])
        request = self._request(message)
        # The GPUs that ranks here used; those of a lease are in the lease's record.
        devices: tuple[str, ...] = ()
        if not message["place"]:
            # The whole run is on this node, which leases devices for it.
            ending = self._stream_run(self._leased, request)
        else:
            if self._given:
                shown = gpus(wanted=self._given)
                devices = shown.ids
                request = _on_given_gpus(request, shown)
            place = Place(**message["place"])
            # The first node opens the store by which the ranks of all nodes find each other
            # (torch's rendezvous), at a free port. pytest's process tells the other nodes.
            self._launcher.listens = lambda port: self._channel.send(
                {"is": "listens", "store": [place.address, port]}
            )
            ending = self._stream_run(self._launcher, request)
        part = self._part_that_ended(request, ending)
        part["devices"] = devices
        shutil.rmtree(self._run, ignore_errors=True)
        return part

    def _set_environment(self, message: Mapping[str, Any]) -> None:
        """Change the environment of this process as the tests changed that of pytest's process.

        Ranks inherit it.
        """
        os.environ.clear()
        os.environ.update({**self._environment, **message["set"]})
        for variable in message["unset"]:
            os.environ.pop(variable, None)

    def _request(self, message: Mapping[str, Any]) -> Request:
        """Return the request of this node's part, with directories of this node.

        Those in the message are paths on the machine of pytest's process. ``here`` of the request
        are the ranks of this node, a range.
        """
        payload = dict(message["request"]["payload"])
        # That of a marked test names the file that describes pytest's session.
        if "session" in payload:
            payload |= {"session": str(self._session), "directory": str(self._run)}
        if payload.get("own_disks"):
            # The nodes share no file system: checkpoints are below this agent's directory.
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
        """Return what pytest's process needs to know of how this part ended.

        Its keys: ``processes`` (rank -> how its process ended), ``known`` (what the watchdog of the
        ranks knows of the launch: ``timed_out``, ``launch_error``, ...), ``leaks`` of GPU memory,
        ``spans`` (the leases of devices), ``output`` (rank -> its stdout, stderr and log), and
        ``recorded`` (file name -> text that a recorder of an extension wrote).
        """
        part: dict[str, Any] = {"is": "ended", "processes": {}}
        part["leaks"] = ending.leaks
        part["known"] = {"launch_error": ending.launch_error}
        # None if no rank was started.
        watch = self._launcher.watch
        if watch is not None:
            part["known"] = watch.known
            for rank, process in watch.processes.items():
                part["processes"][rank] = dataclasses.asdict(process)
        part["spans"] = [dataclasses.asdict(span) for span in read_timeline(self._spans)]
        shutil.rmtree(self._spans, ignore_errors=True)
        part["output"] = {}
        # The ranks that were started on this node.
        for rank in request.here:
            output = written(self._run, rank, request.here.start)
            part["output"][rank] = dict(output)
        part["recorded"] = {}
        for path in recorded_files(self._run):
            part["recorded"][path.name] = path.read_text(encoding="utf-8")
        return part

    def _stream(self, request: Request) -> None:
        """Send whole lines of the ranks' logs as they are written, in a thread of its own."""
        # Rank -> how many bytes of its log are sent.
        sent = dict.fromkeys(request.here, 0)
        last = False
        while not last:
            # Once more after the part has ended, for the last lines.
            last = self._stopped.wait(STREAM_S)
            for rank, offset in sent.items():
                # A rank that has not started has no log yet.
                with contextlib.suppress(FileNotFoundError):
                    lines = self._read_whole_lines(rank, offset)
                    if lines:
                        sent[rank] += len(lines)
                        self._channel.send(
                            {"is": "log", "rank": rank, "lines": lines.decode("utf-8", "replace")}
                        )

    def _read_whole_lines(self, rank: int, offset: int) -> bytes:
        """Return the lines of a rank's log after so many bytes, without one still being written."""
        with self._log_file(rank).open("rb") as file:
            file.seek(offset)
            raw = file.read()
        end = raw.rfind(b"\n") + 1
        return raw[:end]

    def _log_file(self, rank: int) -> Path:
        """Return the path of a rank's log in the current run."""
        return self._run / f"rank-{rank}.jsonl"

    def _receive(self) -> None:
        """Receive messages in a thread of its own, and do at once what must not wait for a run."""
        try:
            while True:
                message = self._channel.receive()
                if message["do"] == "time":
                    self._channel.send({"is": "time", "now": clock.now()})
                elif message["do"] == "log":
                    # The run may be over, and its directory removed.
                    with contextlib.suppress(OSError):
                        self._append_log(message["rank"], message["lines"])
                elif message["do"] == "stop":
                    if self._launcher.watch is not None:
                        # The watchdog of the ranks ends them, and names this reason.
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

    def _append_log(self, rank: int, lines: str) -> None:
        """Add lines to the log of a rank of another node, where ranks here look for it."""
        with self._log_file(rank).open("a", encoding="utf-8") as file:
            file.write(lines)

    def _beat(self) -> None:
        """Send a beat each second, in a thread of its own, and in the end that the agent leaves."""
        with contextlib.suppress(OSError):
            while True:
                self._channel.send({"is": "beat"})
                if self._leaving.wait(HEARTBEAT_S):
                    self._channel.send({"is": "leaving", "why": "its agent got SIGTERM"})
                    break
        self._said.set()

    # The arguments are those of any handler of signals.
    def _end(self, number: int, frame: object) -> NoReturn:  # noqa: ARG002
        """Handle SIGTERM: say that this node leaves, and end what the main thread does."""
        # Once: a second signal must not interrupt what ends the processes.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not self._over:
            # Before the ranks here end: ranks of other nodes notice their end, and pytest's process
            # must know the cause by then. The other thread sends it: this one may have been
            # interrupted while it was sending.
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
    # They are free by the scheduler's count, so this lease waits for nothing.
    lease = Lease(shown.ids, shown.environment(shown.ids))
    variables = rank_environment(lease, len(request.here))
    return dataclasses.replace(request, set={**request.set, **variables})


def _problem_of_writing(path: Path) -> str:
    """Make a file, which pytest's process is to see; return what went wrong, empty if nothing."""
    try:
        path.touch()
    except OSError as error:
        return str(error.strerror)
    return ""
