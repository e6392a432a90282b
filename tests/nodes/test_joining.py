"""Node agents that join a session, and go away while they do."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pytest_distcompat import clock
from pytest_distcompat.ext.cluster.channel import Channel
from pytest_distcompat.ext.cluster.executors import Executor
from pytest_distcompat.ext.cluster.launcher import NodesLauncher
from pytest_distcompat.ext.cluster.node import Node
from pytest_distcompat.ext.cluster.settings import Settings
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.request import Request, Warmth
from pytest_distcompat.lease.pool import boot_id

TOKEN = "a token of the session"
FACTS = {"versions": {}, "sources": {}, "shm": 64, "gpus": 0}


class Elsewhere(Executor):
    """All agents are started by somebody else."""

    name = "elsewhere"
    hint = "join HOST:PORT"

    def start(self, join: Sequence[str], nodes: int, token: str) -> list[object]:  # type: ignore[override]
        return []


class Starts(Elsewhere):
    """Starts an agent again, which never joins."""

    def __init__(self) -> None:
        self.again: list[str] = []

    def restart(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str]:
        self.again.append(name)
        return subprocess.Popen(["sleep", "60"], text=True)


class TakesAway(Elsewhere):
    """Its scheduler takes the nodes away."""

    def taken(self) -> str:
        return "the scheduler preempts job 7"


class NoLauncher(Launcher):
    """Runs of one node, of which there are none."""

    def run(self, request: Request) -> Ending:
        raise NotImplementedError


@pytest.fixture
def executor() -> Executor:
    return Elsewhere()


@pytest.fixture
def launcher(tmp_path: Path, executor: Executor) -> Iterator[NodesLauncher]:
    settings = Settings(2, str(tmp_path), "cpu", ("127.0.0.1", 0), TOKEN, wait=0.2)
    launcher = NodesLauncher(NoLauncher(), executor, settings, Warmth(), "{}")
    launcher.warm_up()
    yield launcher
    launcher.close()


def join(launcher: NodesLauncher, name: str) -> tuple[Channel, str]:
    """Join under that name; return the channel, and why the session refuses it."""
    match = re.search(r"join 127\.0\.0\.1:(\d+)", launcher.ready())
    assert match
    connection = socket.create_connection(("127.0.0.1", int(match[1])), timeout=5)
    channel = Channel(connection, TOKEN.encode(), serves=False)
    channel.send({"name": name, "pid": 1, "boot": ""})
    return channel, channel.receive().get("refused", "")


def test_a_name_is_free_again_once_an_agent_went_away_while_it_joined(launcher: NodesLauncher) -> None:
    first, refused = join(launcher, "n1")
    assert not refused
    second, refused = join(launcher, "n1")
    assert refused == "a node of that name has joined from 127.0.0.1 already; expected another --name"
    second.close()
    first.close()
    deadline = clock.now() + 20
    while refused and clock.now() < deadline:
        channel, refused = join(launcher, "n1")
        channel.close()
    assert not refused


def test_an_agent_that_went_away_is_named(launcher: NodesLauncher) -> None:
    channel, _ = join(launcher, "n1")
    channel.close()
    deadline = clock.now() + 20
    text = ""
    while "n1: its agent went away while it joined" not in text and clock.now() < deadline:
        text = launcher.ready()
    assert text.startswith("0 of 2 nodes are there (none); n1: its agent went away while it joined ("), text


def joined(launcher: NodesLauncher, name: str, wall: float) -> Channel:
    """Join under that name, with a clock that shows that time."""
    channel, refused = join(launcher, name)
    assert not refused
    channel.send({"is": "facts", "facts": {**FACTS, "wall": wall}})
    while channel.receive()["do"] != "warm":
        channel.send({"is": "time", "now": clock.now()})
    return channel


def test_a_clock_that_is_off_is_found_however_late_the_node_joins(
    launcher: NodesLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = clock.wall()
    monkeypatch.setattr(clock, "wall", lambda: now)
    channels = [joined(launcher, "n1", now)]
    now += 100
    channels.append(joined(launcher, "n2", now))
    assert clock.wait_until(lambda: not launcher.ready(), 10)
    channels[1].close()
    assert clock.wait_until(lambda: launcher.ready().startswith("1 of 2 nodes are there (n1); n2: "), 10)
    channels[1] = joined(launcher, "n2", now + 3600)
    wrong = "the clock of n2 is +3600 s off that of n1; expected 5 s at most"
    assert clock.wait_until(lambda: launcher.ready() == wrong, 10)
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("executor", [Starts()])
def test_an_agent_that_does_not_come_back_is_waited_for_once(executor: Starts, launcher: NodesLauncher) -> None:
    channels = [joined(launcher, name, clock.wall()) for name in ("n1", "n2")]
    assert clock.wait_until(lambda: not launcher.ready(), 10)
    channels[1].close()
    wrong = "and a new one does not join"
    assert clock.wait_until(lambda: wrong in launcher.ready(), 10)
    assert wrong in launcher.ready()
    assert executor.again == ["n2"]
    channels[0].close()


@pytest.mark.parametrize("executor", [TakesAway()])
def test_nodes_that_a_scheduler_takes_away(launcher: NodesLauncher) -> None:
    channels = [joined(launcher, name, clock.wall()) for name in ("n1", "n2")]
    assert clock.wait_until(lambda: not launcher.ready(), 10)
    channels[1].send({"is": "leaving", "why": "its agent got SIGTERM"})
    assert clock.wait_until(lambda: launcher.ready() == "the scheduler preempts job 7", 10)
    assert launcher.taken == "the scheduler preempts job 7"
    channels[0].close()


@pytest.mark.parametrize(("boot", "expected"), [(boot_id(), "GPU-0"), ("another", "n2 GPU-0")])
def test_devices_of_another_machine_have_its_name(boot: str, expected: str, launcher: NodesLauncher) -> None:
    channel, _ = join(launcher, "n2")
    assert Node(channel, {"name": "n2", "boot": boot}).device("GPU-0") == expected
    channel.close()


class OneByOne(Elsewhere):
    """Starts agents that never join."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start_one(self, join: Sequence[str], name: str, token: str) -> subprocess.Popen[str]:
        self.started.append(name)
        return subprocess.Popen(["true"], text=True)


def test_runs_of_a_node_that_is_lost_move_to_each_other_node_once(tmp_path: Path) -> None:
    executor, said = OneByOne(), list[str]()
    listen, spare = ("127.0.0.1", 0), ("n2", "n3", "n1")
    settings = Settings(1, str(tmp_path), "cpu", listen, TOKEN, wait=5, node="n1", spare=spare, gpus=0, say=said.append)
    launcher = NodesLauncher(NoLauncher(), executor, settings, Warmth(), "{}")
    launcher.warm_up()
    channel = joined(launcher, "n1", clock.wall())
    channel.close()
    lost = "0 of 1 nodes are there (none); n1: its agent is gone ("
    assert clock.wait_until(lambda: launcher.ready().startswith(lost), 20)
    assert launcher.ready().startswith(lost)
    assert executor.started == ["n1", "n2", "n3", "n1"]
    assert said == [f"n1 is lost; {name} has the runs from now on" for name in spare]
    launcher.close()
