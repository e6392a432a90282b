"""The executor ``ray`` and GPUs: each run has a placement group, and nothing else holds any. Ray and NVML count GPUs that are not there."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.machines.cluster import needs_ray
from tests.machines.test_ray import WITH_GPUS
from tests.pytest_runs import RECORDED, Run, reports

from pytest_distcompat import clock
from pytest_distcompat.lease import entries

pytestmark = [pytest.mark.spawn, pytest.mark.nightly, needs_ray]

NVML = """
import types

class NVMLError(Exception):
    pass

def nvmlInit():
    pass

nvmlShutdown = nvmlInit
nvmlDeviceGetCount = lambda: 4
nvmlDeviceGetHandleByIndex = "GPU-{}".format
nvmlDeviceGetUUID = nvmlDeviceGetHandleByUUID = nvmlDeviceGetName = lambda handle: handle
nvmlDeviceGetMigMode = lambda handle: (0, 0)
nvmlDeviceGetComputeRunningProcesses = lambda handle: []
nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=0)
nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
"""
TESTS = """
import os, time
from pathlib import Path
import pytest

HERE = Path(__file__).parent

def reach(name):
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "unset").split(",")
    (HERE / f"{name}-reached").write_text(",".join(f"GPU-{number}" for number in numbers))
    while not (HERE / f"{name}-go").exists():
        time.sleep(0.02)

@pytest.mark.distcompat(world_size=2, nodes=2)
def test_spans(rank):
    reach(f"spans{rank}")

@pytest.mark.distcompat(world_size=2, nodes=2, timeout=2)
def test_hangs(rank):
    time.sleep(600)

def test_between():
    reach("between")

@pytest.mark.distcompat(world_size=2, nodes=1)
def test_own(rank):
    reach(f"own{rank}")

@pytest.mark.distcompat(world_size=6, nodes=2)
def test_large(rank):
    pass

@pytest.mark.distcompat(world_size=1)
@pytest.mark.parametrize("number", range(2))
def test_shares(number):
    reach(f"shares{number}")
"""


class Sessions:
    """Sessions on a cluster of two nodes with two GPUs each: 0 and 1, 2 and 3."""

    def __init__(self, cluster: Any, environment: dict[str, str], directory: Path) -> None:
        (directory / "test_it.py").write_text(TESTS)
        self.cluster, self.directory = cluster, directory
        recorded = str(directory / "reports.jsonl")
        self._environment = {**environment, "RAY_ADDRESS": cluster.address, "RECORDED_REPORTS": recorded}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, chosen: str, *options: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "pytest", *RECORDED, "-p", "no:cacheprovider", "-k", chosen, *options]
        line += ["--distcompat-executor", "ray"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._started.append(subprocess.Popen(line, env=self._environment, cwd=self.directory, **pipes))
        return self._started[-1]

    def ended(self, session: subprocess.Popen[str]) -> Run:
        out = session.communicate(timeout=200)[0]
        return Run(session.returncode, out, self.directory, reports(self.directory))

    def reached(self, *names: str) -> list[str]:
        """Wait until all these points are reached, and return the visible devices there."""
        paths = [self.directory / f"{name}-reached" for name in names]
        assert clock.wait_until(lambda: all(path.exists() and path.read_text() for path in paths), 200), self._out()
        return [path.read_text() for path in paths]

    def go(self, *names: str) -> None:
        for name in names:
            (self.directory / f"{name}-go").touch()

    def _out(self) -> str:
        self._started[-1].terminate()
        return self._started[-1].communicate(timeout=60)[0]

    def close(self) -> None:
        for session in self._started:
            session.kill()
            session.communicate()


@pytest.fixture(scope="module")
def theirs(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the cluster and of sessions."""
    site = tmp_path_factory.mktemp("site")
    (site / "pynvml.py").write_text(NVML)
    # As older releases of Ray did, nodes hide the GPUs that a task did not ask for.
    variables = {**environment, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    # Other work on this machine may need its memory, and Ray would end agents for it.
    variables["RAY_memory_monitor_refresh_ms"] = "0"
    variables["PYTHONPATH"] += f":{site}"
    del variables["CUDA_VISIBLE_DEVICES"]
    return variables


@pytest.fixture(scope="module")
def cluster(theirs: dict[str, str]) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    nodes = [{**WITH_GPUS, "env_vars": {"CUDA_VISIBLE_DEVICES": visible}} for visible in ("0,1", "2,3")]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in theirs.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
        made.second = made.add_node(**nodes[1])
        made.wait_for_nodes()
    yield made
    made.shutdown()


@pytest.fixture
def sessions(cluster: Any, theirs: dict[str, str], tmp_path: Path) -> Iterator[Sessions]:
    made = Sessions(cluster, theirs, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def free(cluster: Any) -> Iterator[Callable[[], float]]:
    """Returns how many GPUs are free by Ray's accounting."""
    import ray

    ray.init(cluster.address, logging_level="warning")
    yield lambda: ray.available_resources().get("GPU", 0.0)
    ray.shutdown()


def become(free: Callable[[], float], number: int) -> bool:
    return clock.wait_until(lambda: free() == number, 30)


def test_a_run_has_what_it_needs_and_gives_it_back(sessions: Sessions, free: Callable[[], float]) -> None:
    base = sessions.directory / "base"
    session = sessions.start("spans or hangs or between or own or large", f"--basetemp={base}")
    first_device, second_device = sessions.reached("spans0", "spans1")
    assert {first_device[:-1], second_device[:-1]} == {"GPU-"}
    assert {first_device[-1] in "01", second_device[-1] in "01"} == {True, False}
    assert become(free, 2)
    sessions.go("spans0", "spans1")
    sessions.reached("between")
    # Its agents are still there.
    assert become(free, 4)
    sessions.go("between")
    # pytest is on the first node.
    assert {*sessions.reached("own0", "own1")} == {"GPU-0,GPU-1"}
    assert become(free, 2)
    sessions.go("own0", "own1")
    run = sessions.ended(session)
    passed = dict.fromkeys(("test_spans", "test_between", "test_own"), "passed")
    assert run.outcomes == {**passed, "test_hangs": "failed", "test_large": "failed"}, run.out
    assert "time limit of 2 s" in str(run.of("test_hangs")["text"])
    assert re.search(r"test_large needs GPUs \(3 on each node\); by Ray's count \S+-0 has 2, \S+-1 has 2", run.out)
    assert become(free, 4)
    # What a report has; without suites there is none.
    had = [(row["who"].partition("::")[2], row["device"]) for row in entries(base / "distcompat", 0)]
    assert sorted(had[:2]) == sorted(("test_spans", device) for device in (first_device, second_device))
    # One of each node.
    assert [name for name, _ in had[2:4]] == ["test_hangs"] * 2
    assert {device in ("GPU-0", "GPU-1") for _, device in had[2:4]} == {True, False}
    assert had[4:] == [("test_own", "GPU-0"), ("test_own", "GPU-1")]


def test_two_workers_share_the_gpus_of_a_node(sessions: Sessions, free: Callable[[], float]) -> None:
    session = sessions.start("shares", "-n", "2", "--distcompat-worker-nodes", "1")
    seen = sessions.reached("shares0", "shares1")
    # Both of one node.
    assert sorted(seen) in (["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"])
    assert become(free, 2)
    sessions.go("shares0", "shares1")
    run = sessions.ended(session)
    assert [*run.outcomes.values()] == ["passed", "passed"], run.out
    assert become(free, 4)


def test_a_run_waits_for_another_job(sessions: Sessions, free: Callable[[], float]) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"GPU": 2}] * 2)
    assert group.wait(30)
    session = sessions.start("spans")
    assert session.stdout is not None
    waits = functools.partial(re.search, r"waits for GPUs \(1 on \S+, 1 on \S+\); by Ray's count 0 are free")
    shown = next(filter(waits, session.stdout))
    assert shown.startswith("distcompat: ")
    remove_placement_group(group)
    sessions.go("spans0", "spans1")
    run = sessions.ended(session)
    assert run.outcomes == {"test_spans": "passed"}, run.out
    assert become(free, 4)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("point", "what", "number"),
    [
        ("spans0", "pytest", signal.SIGKILL),
        ("between", "pytest", signal.SIGKILL),
        ("spans0", "pytest", signal.SIGINT),
        ("spans0", "pytest_distcompat.ext.cluster.executors._ray_cluster", signal.SIGKILL),
    ],
)
def test_nothing_is_held_after(
    point: str, what: str, number: signal.Signals, sessions: Sessions, free: Callable[[], float]
) -> None:
    session = sessions.start("spans or between")
    sessions.reached("spans0")
    assert become(free, 2)
    if point == "between":
        sessions.go("spans0", "spans1")
        sessions.reached("between")
    pytest_itself = psutil.Process(session.pid)
    ended = next(process for process in (pytest_itself, *pytest_itself.children()) if what in process.cmdline())
    ended.send_signal(number)
    assert become(free, 4)


# The last, since the cluster has one node then.
def test_a_node_is_lost_in_a_run(sessions: Sessions, free: Callable[[], float]) -> None:
    session = sessions.start("spans or between")
    sessions.reached("spans0", "spans1")
    sessions.cluster.remove_node(sessions.cluster.second, allow_graceful=False)
    sessions.reached("between")
    # All of the other one.
    assert become(free, 2)
    sessions.go("between")
    run = sessions.ended(session)
    assert run.outcomes == {"test_spans": "failed", "test_between": "passed"}, run.out
    assert re.search(r"rank \d on \S+ was lost with its node", str(run.of("test_spans")["text"])), run.out
